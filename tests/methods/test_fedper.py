"""Tests of the method 'fedper': site and server."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.client_app.lab import Lab
from fedsilo.core.array_names import is_statistic
from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.messages import ARRAYS, EVALUATE
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.models.methods.fedavg_ft import FedAvgFTSettings
from fedsilo.models.methods.fedbn import FedBNSettings
from fedsilo.models.methods.fedper import FedPerSettings
from fedsilo.models.methods.fedrep import FedRepSettings
from fedsilo.models.networks.site_network import batch_norms, last_layers
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.methods.fedper import FedBN, FedPer
from fedsilo.strategies.methods.personal_models import FedBABU, PersonalState
from fedsilo.strategies.wire.reply import Reply
from tests.support.asking import question_of, state_after
from tests.support.errors import refuses
from tests.support.lab import answer
from tests.support.methods import Opened

# At a site

HEAD = ["head.4.bias", "head.4.weight"]
SGD = {"optimiser": "sgd", "learning_rate": 0.05, "dropout": 0.0}


def without(weights: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: array for name, array in weights.items() if name not in names}


def arrays_of(lab: Lab) -> dict[str, Any]:
    return {name: array.numpy() for name, array in answer(lab)[ARRAYS].items()}


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_the_last_layer_stays_and_the_next_round_begins_with_it(
    method: str, opened: Opened, weights: dict[str, Any]
) -> None:
    shared = without(weights, HEAD)
    sent = arrays_of(opened(method, shared, own=SGD))
    assert sent.keys() == shared.keys()
    second = opened(method, shared, own=SGD, round=2)
    kept = second.state()
    assert sorted(kept) == HEAD
    assert (kept["head.4.bias"].numpy() != weights["head.4.bias"]).any()
    network = dict(second.open().named_parameters())
    assert torch.equal(network["head.4.bias"].detach(), kept["head.4.bias"])
    np.testing.assert_array_equal(network["head.1.bias"].detach(), weights["head.1.bias"])


def test_fedper_trains_both_parts_as_fedavg_does(opened: Opened, weights: dict[str, Any]) -> None:
    sent = arrays_of(opened("fedper", without(weights, HEAD), own=SGD))
    fedavg = arrays_of(opened("fedavg", weights, own=SGD))
    for name, array in sent.items():
        np.testing.assert_array_equal(array, fedavg[name])


def test_personal_layers_counts_layers_with_weights_from_the_end(
    opened: Opened, weights: dict[str, Any]
) -> None:
    network = opened("fedavg", weights).open()
    assert last_layers(network, 1) == HEAD
    assert last_layers(network, 2) == ["head.1.bias", "head.1.weight", *HEAD]


def test_batch_norms_with_their_statistics_stay_with_fedbn(
    opened: Opened, weights: dict[str, Any]
) -> None:
    norms = batch_norms(opened("fedavg", weights).open())
    assert {name.rpartition(".")[2] for name in norms} == {
        *("weight", "bias", "running_mean", "running_var")
    }
    sent = arrays_of(opened("fedbn", without(weights, norms), own=SGD))
    assert not set(sent) & set(norms)
    assert sorted(opened("fedbn", sent, own=SGD, round=2).state()) == sorted(norms)


def test_the_part_that_stays_starts_from_what_the_user_names(
    opened: Opened, weights: dict[str, Any]
) -> None:
    start = {f"start/{name}": np.full_like(weights[name], 0.25) for name in weights}
    network = opened("fedper", without(weights, HEAD) | start).open()
    found = network.state_dict()
    assert (found["head.4.bias"] == 0.25).all()
    np.testing.assert_array_equal(found["head.1.bias"], weights["head.1.bias"])


def test_fedrep_trains_the_head_and_then_the_rest(opened: Opened, weights: dict[str, Any]) -> None:
    lab = opened("fedrep", without(weights, HEAD), own={**SGD, "local_steps": 5, "head_share": 0.5})
    trained: list[tuple[int, set[str], tuple[str, ...]]] = []
    fit = lab.fit

    def spied(network: Any, **options: Any) -> None:
        names = {name for name, p in network.named_parameters() if p.requires_grad}
        before = {name: p.detach().clone() for name, p in network.named_parameters()}
        fit(network, **options)
        moved = {n for n, p in network.named_parameters() if not torch.equal(p, before[n])}
        assert moved <= names
        trained.append((options["steps"], names, options["aside"]))

    lab.fit = spied  # type: ignore[method-assign]
    answer(lab)
    assert [(steps, aside) for steps, _, aside in trained] == [(2, ("head",)), (3, ())]
    assert trained[0][1] == set(HEAD)
    assert not trained[1][1] & set(HEAD)


def test_fedrep_of_a_single_step_is_refused_in_a_line(
    opened: Opened, weights: dict[str, Any]
) -> None:
    lab = opened("fedrep", without(weights, HEAD), own={"batch_size": 64, "local_epochs": 1})
    with refuses(SiteError, "s1a", "1") as error:
        answer(lab)
    assert "\n" not in str(error.value)


# At the server

COMMON = CommonSettings(silos=3, width=2)


def test_the_last_layer_is_neither_in_the_state_nor_sent(participants: Participants) -> None:
    server = FedPer(COMMON, FedPerSettings(), participants)
    state = server.initial_state()
    every = FedAvg(COMMON, NoSettings(), participants).initial_state().arrays
    assert every.keys() - state.arrays.keys() == {"head.4.bias", "head.4.weight"}
    asked = question_of(server, state)
    assert set(asked.send["s1a"]) == set(asked.expect["s1a"]) == set(state.arrays)
    (said,) = server.disclosures().leaves
    assert "except head.4.bias, head.4.weight, which stay" in said


def test_no_batch_norm_is_in_the_state_of_fedbn(participants: Participants) -> None:
    state = FedBN(COMMON, FedBNSettings(), participants).initial_state()
    assert state.arrays
    assert not any(is_statistic(name) for name in state.arrays)


@pytest.mark.parametrize("layers", [1, 5])
def test_a_network_of_which_nothing_would_be_shared_is_refused(
    layers: int, participants: Participants
) -> None:
    common = CommonSettings(method="fedper", dataset="heart-synthetic", network="logistic")
    server = FedPer(common, FedPerSettings(layers), _of_rows(participants))
    with refuses(SettingError, "fedper", "0", "2"):
        server.initial_state()


def _of_rows(participants: Participants) -> Participants:
    """Return the same sites with a table's rows of four features."""
    facts = {
        site: dataclasses.replace(found, input_shape=(4,), classes=2)
        for site, found in participants.facts.items()
    }
    return Participants(facts, participants.nodes)


def test_fedbabu_of_a_network_that_is_a_head_alone_is_refused(participants: Participants) -> None:
    common = CommonSettings(dataset="heart-synthetic", network="logistic")
    with refuses(SettingError, "network"):
        FedBABU(common, FedAvgFTSettings(1), _of_rows(participants)).initial_state()


def test_fedbabu_averages_bodies_beneath_the_head_that_it_sent(
    participants: Participants, site_reply: Callable[..., Reply]
) -> None:
    server = FedBABU(COMMON, FedAvgFTSettings(1), participants)
    bias = "head.4.bias"
    start = PersonalState({"body": np.float32([1]), bias: np.float32([8])})
    asked = question_of(server, start)
    assert set(asked.send["s1a"]) == {"body", bias}
    assert set(asked.expect["s1a"]) == set(asked.reference["s1a"]) == {"body"}
    replies = {
        site: site_reply(site, {"body": np.float32([value])}, num_examples=count)
        for site, value, count in (("s1a", 2.0, 1), ("s2a", 6.0, 3))
    }
    after = state_after(server, start, replies)
    assert {n: a.tolist() for n, a in after.arrays.items()} == {"body": [5.0], bias: [8.0]}
    (said,) = server.disclosures().leaves
    assert "of the network except head.4.bias, head.4.weight, each of the first 29" in said


def test_a_site_that_never_trained_is_measured_with_the_weights_that_the_user_named(
    participants: Participants,
) -> None:
    common = CommonSettings(silos=3, width=2, initial_weights="timm:vgg16_bn")
    server = FedPer(common, FedPerSettings(), participants)
    server.__dict__["_start"] = {"start/head": np.float32([3])}
    state = State({"body": np.float32([1])}, 2, ("s2a",))
    sent = question_of(server, state, EVALUATE).send
    assert set(sent["s1a"]) == {"body", "start/head"}
    assert set(sent["s2a"]) == {"body"}


@pytest.mark.parametrize(("share", "steps", "head"), [(0.5, 5, 2), (0.01, 5, 1), (0.99, 5, 4)])
def test_the_head_has_its_share_of_the_steps_and_neither_part_none(
    share: float, steps: int, head: int
) -> None:
    assert FedRepSettings(head_share=share).head_steps(steps) == head


def test_fedrep_of_one_local_step_is_refused_before_a_run() -> None:
    with refuses(SettingError, "train.local-steps", "1"):
        FedRepSettings().check(CommonSettings(local_steps=1), is_table=False)


def test_a_secret_sum_is_of_the_shared_arrays_where_the_start_is_sent_too(
    spied_run: Callable[..., Any], tiny: Callable[..., dict[str, Any]]
) -> None:
    secret = tiny("fedbn", clip_norm=50.0, secure_aggregation="secagg", optimiser="sgd")
    arrays = spied_run(secret)[1].state.arrays
    assert arrays
    assert not any(is_statistic(name) for name in arrays)
    assert all(np.isfinite(array).all() for array in arrays.values())
