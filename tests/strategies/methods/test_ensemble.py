from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.messages import ARRAYS
from fedsilo.models.contract.own_settings import NoSettings
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.method import State, initial_weights
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.ensemble import Ensemble
from fedsilo.strategies.wire.reply import ArraySpec
from tests.support.asking import arrays_expected, arrays_sent, evaluation_of, state_after

ALL = ["s1a", "s2a", "s3a"]
COMMON = CommonSettings(rounds=3, silos=3, width=1, run_name="run")
WEIGHTS = initial_weights(build_classifier(COMMON, Task((1, 16, 16), 10)))
Run = Callable[..., tuple[Any, RoundLoop]]


def names(message: Message) -> set[str]:
    return set(message.content.array_records.get(ARRAYS, {}))


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
    assert all(not names(message) for message in sent[:9])
    assert [bool(names(reply)) for reply in replies] == [False] * 6 + [True] * 3 + [False] * 3
    assert [told(message)["returns"] for message in sent] == [False] * 6 + [True] * 3 + [False] * 3
    for message in sent[9:]:
        assert names(message) == set(strategy.state.arrays)
        for site, reply in zip(ALL, replies[6:9], strict=True):
            for name, array in reply.content[ARRAYS].items():
                received = message.content[ARRAYS][f"expert/{site}/{name}"]
                np.testing.assert_array_equal(received.numpy(), array.numpy())


def failing_in(round_: int, told: Any, good: Callable[[Message], RecordDict]) -> Any:
    def answer(message: Message) -> RecordDict:
        if told(message)["round"] == round_:
            raise OSError("the network is down")
        return good(message)

    return answer


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
        app = fake_app(good, s2a=failing_in(round_, told, good))
        strategy.start(spy_grid(app), 3, 20)
        return strategy

    assert sorted({n.split("/")[1] for n in run(2).state.arrays}) == experts
    with pytest.raises(SiteError, match=f"site s2a, round {round_}, .*the network is down"):
        run(0)


def test_the_ensemble_says_that_models_leave_and_go_to_all_others(
    participants: Participants,
) -> None:
    (told,) = ensemble(participants).disclosures().leaves
    assert "all weights" in told
    assert "go to all other sites" in told
