from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fedsilo.core.errors import SiteError
from fedsilo.core.messages import EVALUATE, TRAIN
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavg import FedAvg

START = {"w": np.zeros(2, np.float32)}


class Ending(Hook):
    """Takes a failure as the end where ``forgiving``."""

    def __init__(self, forgiving: bool = False) -> None:
        self.forgiving = forgiving

    def why_end(self, state: State, error: SiteError) -> str:
        return f"it was too much: {error}" if self.forgiving else ""


@pytest.fixture
def run(spy_grid: Any, participants: Participants) -> Callable[..., tuple[Any, RoundLoop]]:
    def go(app: Any, *hooks: Hook, rounds: int = 3) -> tuple[Any, RoundLoop]:
        common = CommonSettings(silos=3, run_name="run", rounds=rounds)
        strategy = RoundLoop(FedAvg(common, NoSettings(), participants), hooks, "/somewhere")
        grid = spy_grid(app)
        strategy.state = State(START)
        strategy.start(grid, rounds, 20)
        return grid, strategy

    return go


def phases(grid: Any, told: Any) -> list[tuple[Any, Any]]:
    return [(told(m)["round"], told(m)["phase"]) for m in grid.sent[::3]]


def test_a_run_that_ends_by_itself_has_no_reason(run: Any, fake_app: Any) -> None:
    _, strategy = run(fake_app(), Ending(forgiving=True))
    assert strategy.stopped == ""
    assert strategy.state.round == 3


def failing_in(round_: int, answering: Any, told: Any) -> Callable[[Message], RecordDict]:
    usual = answering(3.0)

    def answer(message: Message) -> RecordDict:
        if (told(message)["round"], told(message)["phase"]) == (round_, TRAIN):
            raise RuntimeError("the disk is full")
        found: RecordDict = usual(message)
        return found

    return answer


def test_a_failed_round_is_taken_back_where_a_hook_says_that_it_ends_the_run_well(
    run: Any, fake_app: Any, answering: Any, recorder: Any, told: Any
) -> None:
    app = fake_app(answering(3.0), s2a=failing_in(2, answering, told))
    grid, strategy = run(app, recorder, Ending(forgiving=True))
    assert phases(grid, told) == [(1, TRAIN), (2, TRAIN), (2, EVALUATE)]
    assert strategy.state.round == 1
    assert strategy.state.arrays["w"].tolist() == [3, 3]
    assert strategy.stopped.startswith("it was too much: site s2a, round 2, phase train: ")
    assert recorder.events[-1] == ("run ended", 1)


def test_a_failed_round_is_a_failure_where_no_hook_knows_better(
    run: Any, fake_app: Any, answering: Any, told: Any
) -> None:
    with pytest.raises(SiteError, match="the disk is full"):
        run(fake_app(s2a=failing_in(2, answering, told)), Ending(), Hook())
