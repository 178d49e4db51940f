"""Tests of the method 'mix': site and server."""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.mix import pooled_training_data
from fedsilo.client_app.session import finished_session
from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.messages import ARRAYS, METRICS, STANDARDISED, Instruction
from fedsilo.core.methods import title_of
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.datasets.registry import load_silo
from fedsilo.models.methods.mix import PoolNotes
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.site_network import exchanged_arrays
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavg import Mix
from fedsilo.strategies.wire.records import to_record
from fedsilo.strategies.wire.reply import ArraySpec
from tests.support.asking import (
    arrays_expected,
    arrays_sent,
    evaluation_of,
    question_of,
    state_after,
)
from tests.support.errors import refuses
from tests.support.lab import answer, fitted, steps_of
from tests.support.methods import ALL, Opened

# At a site


def trainer(sites: str = "s1a s2a s3a", **fields: Any) -> dict[str, Any]:
    return {"notes": PoolNotes(tuple(sites.split())).to_values(), "run_dir": "/somewhere", **fields}


@pytest.mark.parametrize("sites", ["s1a s2a s3a", "s1a s3a", "s2a"])
def test_the_trainer_pools_exactly_the_named_sites_rows(opened: Opened, sites: str) -> None:
    method = opened("mix", **trainer(sites))
    pooled = pooled_training_data(method)
    silos = [load_silo(name, method.common) for name in sites.split()]
    assert len(pooled) == 36 * len(silos)
    assert torch.equal(pooled.inputs, torch.cat([silo.train.inputs for silo in silos]))
    assert torch.equal(pooled.labels, torch.cat([silo.train.labels for silo in silos]))


def test_no_validation_or_test_sample_is_pooled(opened: Opened) -> None:
    method = opened("mix", **trainer())
    pooled = {row.numpy().tobytes() for row in pooled_training_data(method).inputs}
    for name in ("s1a", "s2a", "s3a"):
        silo = load_silo(name, method.common)
        for split in (silo.val, silo.test):
            assert not pooled & {row.numpy().tobytes() for row in split.inputs}


def test_a_table_is_pooled_after_it_was_standardised_by_the_statistics_that_came(
    resolved: Callable[..., Any],
) -> None:
    own = {"dataset": "heart-synthetic", "silo_train_size": 0, "silo_test_size": 0, "silos": 9}
    settings = resolved("mix", **own)
    statistics = FeatureStatistics(np.full(13, 2.0), np.full(13, 4.0))
    content = RecordDict({STANDARDISED: to_record(vars(statistics))})
    note = PoolNotes(("cleveland", "va")).to_values()
    instruction = Instruction(1, "train", run_name="run", run_dir="/somewhere", notes=note)
    silos = [load_silo(name, settings.common) for name in ("cleveland", "va")]
    session = finished_session(settings.common, settings.own, silos[0])
    found = pooled_training_data(Lab(session, content, instruction)).inputs
    raw = torch.cat([silo.train.inputs for silo in silos])
    assert torch.allclose(found, (raw - 2) / 4)


def test_a_real_site_refuses_to_pool(opened: Opened, weights: dict[str, Any]) -> None:
    method = opened("mix", weights, **trainer(run_dir=""))
    with refuses(SiteError, "s1a", "mix"):
        answer(method)


def test_a_servers_run_directory_makes_no_simulation_of_a_real_site(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("mix", weights, **trainer())
    assert method.instruction.run_dir
    method.session = dataclasses.replace(method.session, simulated=False)
    with pytest.raises(SiteError, match="which only a simulation can"):
        pooled_training_data(method)


def test_the_trainer_returns_all_weights(opened: Opened, weights: dict[str, Any]) -> None:
    reply = answer(opened("mix", weights, **trainer()))
    assert set(reply[ARRAYS]) == set(weights)
    assert "trained.val.loss" in reply[METRICS]
    assert reply[METRICS]["trained.val.loss"] != reply[METRICS]["incoming.val.loss"]
    assert not np.array_equal(reply[ARRAYS]["head.4.bias"].numpy(), weights["head.4.bias"])


def test_a_pool_of_one_site_is_that_sites_own_training(
    opened: Opened, weights: dict[str, Any]
) -> None:
    alone, fedavg = (
        answer(opened("mix", weights, **trainer("s1a"))),
        opened("fedavg", weights),
    )
    for name, array in answer(fedavg)[ARRAYS].items():
        np.testing.assert_array_equal(alone[ARRAYS][name].numpy(), array.numpy())


def test_a_site_that_is_not_the_trainer_only_measures(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("mix", weights, site="s2a", own={"mc_passes": 0}, **trainer(returns=False))
    reply = answer(method)
    assert ARRAYS not in reply
    assert reply[METRICS]["kept-state"] == 0
    network = build_classifier(method.common, method.silo.shape).eval()
    with torch.no_grad():
        expected = network.loss(method.silo.train.inputs, method.silo.train.labels).item()
    assert reply[METRICS]["trained.train.loss"] == pytest.approx(expected, rel=1e-4)
    assert [key for key in reply[METRICS] if key.startswith("trained.")] == ["trained.train.loss"]
    assert {"incoming.val.loss", "incoming.test.loss"} <= set(reply[METRICS])


def test_a_site_that_is_not_the_trainer_leaves_the_network_as_it_came(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("mix", weights, site="s2a", **trainer(returns=False))
    network = method.open()
    fitted(method, network)
    for name, tensor in exchanged_arrays(network).items():  # type: ignore[arg-type]  # a Module
        np.testing.assert_array_equal(tensor, weights[name])


@pytest.mark.parametrize(
    ("steps", "sites", "expected"), [(0, "s1a s2a", 0), (5, "s1a", 5), (5, "s1a s2a s3a", 15)]
)
def test_the_oracle_takes_as_many_steps_as_all_sites_together(
    opened: Opened, weights: dict[str, Any], steps: int, sites: str, expected: int
) -> None:
    method = opened("mix", weights, own={"local_steps": steps}, **trainer(sites))
    found = steps_of(method).fit["settings"]
    assert found.local_steps == expected
    assert found.local_epochs == 1


def test_the_classes_weigh_in_the_pool_as_the_pools_own_labels_have_them(
    opened: Opened, weights: dict[str, Any]
) -> None:
    sites = " ".join(f"silo-{number}" for number in range(1, 6))
    own = {"class_weights": "balanced", "partition": "unseen", "silos": 5}
    method = opened("mix", weights, site="silo-1", own=own, **trainer(sites))
    held = torch.unique(method.silo.train.labels)
    assert len(held) == 2
    seen: list[float] = []

    def fit(network: Any, **_: Any) -> None:
        sure = torch.full((1, 10), -50.0).scatter_(1, torch.tensor([[int(held[0])]]), 50.0)
        seen.extend(network.criterion(sure, torch.tensor([label])).item() for label in range(10))

    with mock.patch.object(method, "fit", fit):
        answer(method)
    # A label that the trainer itself has none of cost nothing, so that it was never learned
    assert all(loss > 50 for label, loss in enumerate(seen) if label != held[0])


# At the server

STATE = State({"w": np.float32([4])}, 1)


@pytest.fixture
def mix(participants: Participants) -> Mix:
    return Mix(CommonSettings(silos=3, width=1), NoSettings(), participants)


def test_only_the_first_site_is_expected_to_answer_with_weights(mix: Mix) -> None:
    found = {site: arrays_expected(mix, STATE)[site] for site in ALL}
    assert found == {"s1a": {"w": ArraySpec((1,))}, "s2a": {}, "s3a": {}}


def test_all_sites_get_the_weights_to_measure_them(mix: Mix) -> None:
    assert all(arrays_sent(mix, STATE)[site] == STATE.arrays for site in ALL)


def test_the_sites_to_pool_are_named_a_line_each(mix: Mix) -> None:
    assert question_of(mix, STATE).notes["s1a"] == PoolNotes(("s1a", "s2a", "s3a"))
    assert evaluation_of(mix, STATE).notes == {}


def test_the_trainers_weights_are_taken_as_they_are(
    mix: Mix, site_reply: Callable[..., Any]
) -> None:
    replies = {"s1a": site_reply("s1a", {"w": [7.0]}), "s2a": site_reply("s2a")}
    after = state_after(mix, STATE, replies)
    assert after.arrays["w"].tolist() == [7]


def test_a_round_without_the_trainer_changes_nothing(
    mix: Mix, site_reply: Callable[..., Any]
) -> None:
    assert state_after(mix, STATE, {"s2a": site_reply("s2a")}) == STATE


@pytest.mark.parametrize("real", [["s2a"], ["s1a", "s3a"]])
def test_an_oracle_over_real_sites_is_refused(participants: Participants, real: list[str]) -> None:
    facts = {
        site: dataclasses.replace(found, simulated=site not in real)
        for site, found in participants.facts.items()
    }
    strategy = Mix(CommonSettings(silos=3), NoSettings(), Participants(facts, participants.nodes))
    with pytest.raises(SettingError, match=rf"{', '.join(real)} are not simulated sites"):
        strategy.initial_state()


def test_in_a_run_one_site_trains_and_all_measure(
    spied_run: Callable[..., Any], tiny: Callable[..., dict[str, Any]], told: Any
) -> None:
    grid, strategy = spied_run(tiny("mix", rounds=2))
    sent, replies = grid.sent[3:], grid.replies[3:]
    assert [told(m)["returns"] for m in sent] == [True, False, False] * 2 + [False] * 3
    assert [ARRAYS in r.content.array_records for r in replies[:6]] == [True, False, False] * 2
    assert all("incoming.test.accuracy" in r.content["metrics"] for r in replies)
    for name, array in strategy.state.arrays.items():
        np.testing.assert_array_equal(array, replies[3].content[ARRAYS][name].numpy())


def test_the_oracle_says_that_it_is_none_of_the_federated_methods(mix: Mix) -> None:
    (told,) = mix.disclosures().leaves
    assert "everything" in told
    assert "simulation only" in told
    assert "oracle" in title_of("mix")
