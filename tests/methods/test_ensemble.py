"""Tests of the method 'ensemble': site and server."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Message, RecordDict

from fedsilo.core.errors import SettingError, SiteError
from fedsilo.core.messages import ARRAYS, METRICS, Instruction
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.mixture import Mixture, expert_array
from fedsilo.models.networks.site_network import TokenClassifier, load_exchanged
from fedsilo.strategies.loop.method import State, initial_weights
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.local import Ensemble
from fedsilo.strategies.wire.reply import ArraySpec
from tests.support.asking import arrays_expected, arrays_sent, evaluation_of, state_after
from tests.support.errors import refuses
from tests.support.lab import answer, evaluate
from tests.support.methods import ALL, Opened, arrays_of, fail_in_rounds

# At a site

ODDS = {"s1a": 0.0, "s2a": 4.0, "s3a": 8.0}  # what is added to the last bias of each expert


@pytest.fixture
def experts(weights: dict[str, Any]) -> dict[str, Any]:
    """Return what the server sends at the end: each site's expert, which prefers class 0."""
    first = np.eye(10, dtype=np.float32)[0]
    return {
        expert_array(site, name): array + (odds * first if name == "head.4.bias" else 0)
        for site, odds in ODDS.items()
        for name, array in weights.items()
    }


def test_a_site_trains_alone_as_local_does(opened: Opened) -> None:
    reply = answer(opened("ensemble", returns=False))
    alone = answer(opened("local"))
    assert ARRAYS not in reply
    for key in ("incoming.test.loss", "trained.train.loss", "trained.val.entropy"):
        assert reply[METRICS][key] == alone[METRICS][key]


def test_a_site_goes_on_from_its_own_model(opened: Opened) -> None:
    first = opened("ensemble", returns=False)
    assert answer(first)[METRICS]["kept-state"] == 1
    kept = first.state_files.load_before(Instruction(2, "train"))
    assert kept is not None
    network = cast(TokenClassifier, opened("ensemble", round=2, returns=False).open())
    assert torch.equal(network.state_dict()["head.4.bias"], kept["head.4.bias"])


def test_the_model_leaves_the_site_when_it_is_asked_for(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("ensemble")
    reply = answer(method)
    assert set(reply[ARRAYS]) == set(weights)
    kept = method.state_files.load_before(Instruction(2, "train"))
    assert kept is not None
    for name, array in reply[ARRAYS].items():
        np.testing.assert_array_equal(array.numpy(), kept[name])


def test_the_ensemble_is_the_mean_of_the_experts_probabilities(
    opened: Opened, experts: dict[str, Any], weights: dict[str, Any]
) -> None:
    method = opened("ensemble", experts, phase="evaluate")
    network = cast(Mixture, method.open()).eval()
    inputs = method.silo.test.inputs
    alone = build_classifier(method.common, method.silo.shape).eval()
    load_exchanged(alone, {name: torch.from_numpy(array) for name, array in weights.items()})
    with torch.no_grad():
        logits = alone(inputs)
        said = []
        for odds in ODDS.values():
            raised = logits.clone()
            raised[:, 0] += odds
            said.append(torch.softmax(raised, dim=1))
        found = network(inputs).exp()
    assert torch.allclose(found, sum(said) / 3, atol=1e-6)  # type: ignore[arg-type]  # three
    assert network.sites == ["s1a", "s2a", "s3a"]


def test_the_ensemble_is_measured_at_the_end_and_nothing_is_stored(
    opened: Opened, experts: dict[str, Any]
) -> None:
    method = opened("ensemble", experts, phase="evaluate", own={"mc_passes": 0})
    found = evaluate(method)
    labels, inputs = method.silo.test.labels, method.silo.test.inputs
    with torch.no_grad():
        logs = cast(Mixture, method.open()).eval()(inputs)
    expected = -logs[torch.arange(len(labels)), labels].mean().item()
    assert found[METRICS]["incoming.test.loss"] == pytest.approx(expected, rel=1e-4)
    assert found[METRICS]["kept-state"] == 0
    assert not method.state_files.folder.exists()


def test_an_ensemble_of_one_is_that_expert(opened: Opened, weights: dict[str, Any]) -> None:
    one = {expert_array("s1a", name): array for name, array in weights.items()}
    own = {"mc_passes": 0}
    found = evaluate(opened("ensemble", one, phase="evaluate", own=own))[METRICS]
    alone = evaluate(opened("fedavg", weights, phase="evaluate", own=own))[METRICS]
    for key in ("accuracy", "loss", "entropy"):
        assert found[f"incoming.test.{key}"] == pytest.approx(alone[f"incoming.test.{key}"])


def test_an_expert_that_does_not_fit_is_refused(opened: Opened, experts: dict[str, Any]) -> None:
    del experts[expert_array("s2a", "head.4.bias")]
    with refuses(SettingError, "head.4.bias"):
        evaluate(opened("ensemble", experts, phase="evaluate"))


# At the server

COMMON = CommonSettings(rounds=3, silos=3, width=1, run_name="run")
WEIGHTS = initial_weights(build_classifier(COMMON, NetworkShape((1, 16, 16), 10)))
Run = Callable[..., tuple[Any, RoundLoop]]


def ensemble(participants: Participants) -> Ensemble:
    return Ensemble(COMMON, NoSettings(), participants)


@pytest.mark.parametrize(("round_", "expects"), [(0, False), (1, False), (2, True)])
def test_only_the_last_round_expects_the_sites_own_models(
    participants: Participants, round_: int, expects: bool
) -> None:
    found = arrays_expected(ensemble(participants), State({}, round_))["s1a"]
    every = {name: ArraySpec(array.shape) for name, array in WEIGHTS.items()}
    assert found == (every if expects else {})


def test_nothing_goes_out_before_the_end(participants: Participants) -> None:
    strategy, state = (
        ensemble(participants),
        State({"expert/s1a/w": np.zeros(1, np.float32)}, 3),
    )
    assert arrays_sent(strategy, state)["s2a"] == {}
    assert evaluation_of(strategy, state).send["s2a"] == state.arrays
    assert strategy.initial_state().arrays == {}


def test_models_are_collected_by_site_and_not_averaged(
    participants: Participants, site_reply: Any
) -> None:
    replies = {
        site: site_reply(site, {n: np.full_like(a, value) for n, a in WEIGHTS.items()})
        for site, value in (("s1a", 1), ("s3a", 3))
    }
    after = state_after(ensemble(participants), State({}, 2), replies)
    assert set(after.arrays) == {f"expert/{s}/{n}" for s in ("s1a", "s3a") for n in WEIGHTS}
    assert (after.arrays["expert/s1a/head.4.bias"] == 1).all()
    assert (after.arrays["expert/s3a/head.4.bias"] == 3).all()
    replies = {"s1a": site_reply("s1a")}
    assert state_after(ensemble(participants), State({}), replies).arrays == {}


def test_weights_cross_the_wire_once_up_and_once_down(
    spied_run: Run, tiny: Callable[..., dict[str, Any]], told: Any
) -> None:
    grid, strategy = spied_run(tiny("ensemble", rounds=3))
    sent, replies = grid.sent[3:], grid.replies[3:]
    assert all(not arrays_of(message.content) for message in sent[:9])
    with_arrays = [bool(arrays_of(reply.content)) for reply in replies]
    assert with_arrays == [False] * 6 + [True] * 3 + [False] * 3
    assert [told(message)["returns"] for message in sent] == [False] * 6 + [True] * 3 + [False] * 3
    for message in sent[9:]:
        assert set(arrays_of(message.content)) == set(strategy.state.arrays)
        for site, reply in zip(ALL, replies[6:9], strict=True):
            for name, array in reply.content[ARRAYS].items():
                received = message.content[ARRAYS][f"expert/{site}/{name}"]
                np.testing.assert_array_equal(received.numpy(), array.numpy())


@pytest.mark.parametrize(("round_", "experts"), [(2, ALL), (3, ["s1a", "s3a"])])
def test_a_site_that_fails_in_the_last_round_has_no_voice(
    participants: Participants,
    spy_grid: Any,
    fake_app: Any,
    content: Any,
    measured: dict[str, float],
    told: Any,
    round_: int,
    experts: list[str],
) -> None:
    def good(message: Message) -> RecordDict:
        arrays = WEIGHTS if told(message)["returns"] else None
        found: RecordDict = content(arrays, **measured)
        return found

    def run(min_sites: int) -> RoundLoop:
        common = CommonSettings(rounds=3, silos=3, width=1, run_name="run", min_sites=min_sites)
        strategy = RoundLoop(Ensemble(common, NoSettings(), participants), run_dir="/somewhere")
        app = fake_app(good, s2a=fail_in_rounds([round_], told, good))
        strategy.start(spy_grid(app), 3, 20)
        return strategy

    assert sorted({n.split("/")[1] for n in run(2).state.arrays}) == experts
    with refuses(SiteError, "s2a", round_):
        run(0)


def test_the_ensemble_says_that_models_leave_and_go_to_all_others(
    participants: Participants,
) -> None:
    (told,) = ensemble(participants).disclosures().leaves
    assert "all weights" in told
    assert "go to all other sites" in told
