"""The best round by a validation metric: when a run stops, and what it has kept, by hand."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fedsilo.core.files.state_files import load_state
from fedsilo.core.messages import measurement
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import SiteFacts
from fedsilo.server_app.records.checkpoints import BestRound
from fedsilo.server_app.records.recorder import Recorder
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.strategies.loop.method import Disclosures, Method, State
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.reply import Reply

SIZES = {"a": 10, "b": 30}  # validation samples


def facts_of(sizes: Mapping[str, int]) -> dict[str, SiteFacts]:
    return {
        site: SiteFacts(site, "D1", (1,), 2, {"train": [4], "val": [count]}, {})
        for site, count in sizes.items()
    }


class Counted(Method):
    """A method whose model is its round's number, and whose sites answer what they are given."""

    def __init__(self, common: CommonSettings, values: list[Any], recorder: Recorder) -> None:
        super().__init__(common, None, Participants(facts_of(SIZES), {}))
        self.values, self.recorder = values, recorder

    def initial_state(self) -> State:
        return State({"w": np.float32([0])})

    def round(self, state: State, ask: Any) -> State:
        self.tell(state, state.round + 1, "train")
        return State({"w": np.float32([state.round + 1])})

    def disclosures(self) -> Disclosures:
        return Disclosures()

    def evaluate(self, state: State, ask: Any) -> None:
        self.tell(state, state.round, "evaluate")

    def tell(self, state: State, round_: int, phase: str) -> None:
        """Have the sites measure ``state``'s model; a pair of values is of a and b."""
        told = self.values[state.round - 1] if state.round else 0.0
        both = told if isinstance(told, tuple) else (told, told)
        replies = {
            site: Reply(site, {}, {measurement("incoming", "val", "accuracy"): value}, 4)
            for site, value in zip(SIZES, both, strict=True)
            if value is not None
        }
        self.recorder.phase_ended(round_, phase, replies)


def loop_of(folder: Path, values: list[Any], **own: Any) -> tuple[RoundLoop, BestRound]:
    folder.mkdir(exist_ok=True)
    settings = {"rounds": len(values), "early_stopping_metric": "accuracy", **own}
    common, directory = CommonSettings(**settings), RunDirectory(folder)
    recorder = Recorder(directory)
    method = Counted(common, values, recorder)
    hook = BestRound(common, directory, recorder, method)
    return RoundLoop(method, [recorder, hook]), hook


def run(folder: Path, values: list[Any], **own: Any) -> tuple[RoundLoop, BestRound]:
    loop, hook = loop_of(folder, values, **own)
    loop.start(cast(Any, None), len(values))
    return loop, hook


@pytest.mark.parametrize(
    ("values", "own", "stopped", "best"),
    [
        # Best after round 2; 3 and 4 are no better, which is known when round 5 has begun
        ([0.5, 0.6, 0.6, 0.55, 0.9, 0.9], {"patience": 2}, 5, (5, 0.9)),
        ([0.5, 0.6, 0.6, 0.55, 0.4, 0.9], {"patience": 2}, 5, (2, 0.6)),
        ([0.5, 0.6, 0.5, 0.7, 0.5, 0.8], {"patience": 2}, 6, (6, 0.8)),
        ([0.9, 0.5, 0.5, 0.5], {"patience": 1}, 3, (1, 0.9)),
        # By samples: (10 a + 30 b) / 40; the mean of the two would be best after round 1
        ([(1.0, 0.6), (0.5, 0.8), (0.0, 0.0)], {"patience": 2}, 3, (2, 0.725)),
        # b withholds it in round 2
        ([(0.4, 0.4), (0.7, None), (0.5, 0.5)], {"patience": 9}, 3, (2, 0.7)),
        # Nobody measures round 2: it counts neither way
        ([0.5, (None, None), 0.4, 0.3, 0.9], {"patience": 2}, 5, (5, 0.9)),
    ],
)
def test_a_run_stops_after_the_right_round_and_has_kept_the_best(
    values: list[Any],
    own: dict[str, Any],
    stopped: int,
    best: tuple[int, float],
    tmp_path: Path,
) -> None:
    loop, hook = run(tmp_path, values, **own)
    assert loop.state.round == stopped
    assert bool(loop.stopped) == (stopped < len(values))
    assert (hook.best["round"], hook.best["value"]) == pytest.approx(best)
    arrays, facts = load_state(tmp_path / "best.safetensors")
    assert (arrays["w"].tolist(), facts["round"]) == ([best[0]], best[0])


def test_why_a_run_stopped_is_a_sentence(tmp_path: Path) -> None:
    loop, _ = run(tmp_path, [0.5, 0.25, 0.25, 0.25, 0.25], patience=2)
    assert loop.stopped == (
        "stopped early after round 4 of 5: validation accuracy was best after round 1 (0.5000) "
        "and no better in 2 measured rounds"
    )


def test_smaller_is_better_of_a_loss(tmp_path: Path) -> None:
    hook = loop_of(tmp_path, [0.0], early_stopping_metric="loss")[1]
    hook.best = {"value": 1.0}
    assert [hook._is_better(value) for value in (0.8, 1.0, 1.2)] == [True, False, False]


def test_a_resumed_run_stops_after_the_same_round_with_the_same_best(tmp_path: Path) -> None:
    values = [0.5, 0.6, 0.6, 0.55, 0.3, 0.9]
    whole, expected = run(tmp_path / "whole", values, patience=2)
    for died in range(1, 5):
        folder = tmp_path / f"died-{died}"
        hook = run_until(folder, values, died)
        loop, again = loop_of(folder, values, patience=2)
        again.restore(json.loads(json.dumps(hook.state())))  # as a checkpoint holds it
        again.recorder.restore(hook.recorder.state())
        loop.state = hook.unjudged
        loop.start(cast(Any, None), len(values))
        assert loop.state.round == whole.state.round == 5
        assert again.best == expected.best


def run_until(folder: Path, values: list[Any], rounds: int) -> BestRound:
    """Run so many rounds and no final evaluation."""
    loop, hook = loop_of(folder, values, patience=2)
    loop.hooks.call("run_started", loop.state, loop.method.participants, rounds)
    loop.connect(cast(Any, None))
    for _ in range(rounds):
        loop.run_round()
    return hook
