"""What one sees during a run, and the recorders' files by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from flwr.app import MetricRecord, RecordDict
from rich.console import Console

from fedsilo.models.contract.messages import METRICS, NUM_EXAMPLES, PEAK_MEMORY, SECONDS
from fedsilo.models.contract.site_facts import SiteFacts
from fedsilo.server_app.records.recorders import FailureHook, MetricsHook, TrafficHook
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.run.progress import ProgressHook
from fedsilo.server_app.run.progress_bars import (
    PROGRESS_VARIABLE,
    Bars,
    MarkerBars,
    TerminalBars,
    choose_bars,
    follow,
)
from fedsilo.strategies.loop.state import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.uefl import UEFL
from fedsilo.strategies.wire.reply import Reply

FACTS = SiteFacts("s1a", "D1", (1, 16, 16), 10, {"train": [1]}, {"train": "x"})
ROSTER = Participants({"s1a": FACTS}, {"s1a": 5})


def _reply(site: str = "s1a", **metrics: float) -> Reply:
    named = {key.replace("__", "."): value for key, value in metrics.items()}
    fixed = {NUM_EXAMPLES: 4, SECONDS: 1.5, PEAK_MEMORY: 1000}
    return Reply(site, RecordDict({METRICS: MetricRecord({**fixed, **named})}), 10, 3)


def test_incoming_figures_describe_the_round_before_and_trained_ones_their_own(
    tmp_path: Path,
) -> None:
    hook = MetricsHook(RunDirectory(tmp_path))
    hook.phase_ended(
        1, "train", {"s1a": _reply(incoming__test__accuracy=0.1, trained__train__loss=2.0)}
    )
    hook.round_ended(State({}, 1))
    hook.phase_ended(1, "evaluate", {"s1a": _reply(incoming__test__accuracy=0.5)})
    hook.run_ended(State({}, 1))
    assert (tmp_path / "metrics.csv").read_text() == (
        "round,site,split,metric,value\n"
        "0,s1a,test,accuracy,0.1\n"
        "1,s1a,test,accuracy,0.5\n"
        "1,s1a,train,trained-loss,2.0\n"
    )
    assert hook.values(1, "test") == {"s1a": {"accuracy": 0.5}}


def test_special_phases_leave_metrics_alone_and_cost_traffic(tmp_path: Path) -> None:
    metrics, traffic = MetricsHook(RunDirectory(tmp_path)), TrafficHook(RunDirectory(tmp_path))
    for hook in (metrics, traffic):
        hook.phase_ended(1, "uncertainty", {"s1a": _reply(incoming__val__entropy=0.5)})
    assert metrics.rows == []
    traffic.round_ended(State({}, 1))
    assert (tmp_path / "traffic.csv").read_text() == (
        "round,phase,site,bytes_down,bytes_up,seconds\n1,uncertainty,s1a,10,3,1.5\n"
    )
    assert traffic.totals() == {"down": 10, "up": 3}
    assert traffic.seconds() == {"s1a": 1.5}
    assert traffic.peak_memory == {"s1a": 1000}


def test_hooks_take_back_what_they_gave(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for make in (lambda: MetricsHook(directory), lambda: TrafficHook(directory), FailureHook):
        one, other = make(), make()
        one.phase_ended(1, "train", {"s1a": _reply(incoming__test__accuracy=0.1)})
        one.site_failed(1, "train", "s2a", "gone")
        other.restore(one.state())
        assert other.state() == one.state()


def _rounds(metrics: MetricsHook, traffic: TrafficHook, first: int, last: int) -> None:
    for round_ in range(first, last + 1):
        reply = _reply(incoming__test__accuracy=round_ / 10, trained__train__loss=1 / round_)
        for hook in (metrics, traffic):
            hook.phase_ended(round_, "train", {"s1a": reply})
            hook.round_ended(State({}, round_))


def _files(folder: Path) -> list[str]:
    return [(folder / name).read_text() for name in ("metrics.csv", "traffic.csv")]


def test_a_checkpoint_of_any_age_goes_on_to_the_same_files(tmp_path: Path) -> None:
    folders = {name: RunDirectory(tmp_path / name) for name in ("whole", "new", "old")}
    _rounds(MetricsHook(folders["whole"]), TrafficHook(folders["whole"]), 1, 5)
    before = MetricsHook(folders["new"]), TrafficHook(folders["new"])
    _rounds(*before, 1, 3)
    known = [json.loads(json.dumps(hook.state())) for hook in before]
    _rounds(*before, 4, 4)  # written, and then it dies before its checkpoint
    assert len(json.dumps(known)) < 700, "a checkpoint holds no rows of rounds that are over"
    after = MetricsHook(folders["new"]), TrafficHook(folders["new"])
    for hook, state in zip(after, known, strict=True):
        hook.restore(state)
    _rounds(*after, 4, 5)
    assert _files(folders["new"].path) == _files(folders["whole"].path)
    # A checkpoint of before held all rows, traffic's with peaks and operations
    metrics = [[0, "s1a", "test", "accuracy", 0.1], [1, "s1a", "train", "trained-loss", 1.0]]
    oldest = MetricsHook(folders["old"]), TrafficHook(folders["old"])
    oldest[0].restore(metrics)
    oldest[1].restore([[[1, "train", "s1a", 10, 3, 1.5]], {"s1a": 1000}])
    _rounds(*oldest, 2, 5)
    assert _files(folders["old"].path) == _files(folders["whole"].path)
    assert oldest[1].totals() == {"down": 50, "up": 15}
    assert oldest[1].seconds() == {"s1a": 7.5}
    assert oldest[0].values(4, "test") == {"s1a": {"accuracy": 0.5}}


def test_a_round_is_one_line_with_figures_and_time_left(tmp_path: Path) -> None:
    text = io.StringIO()
    metrics = MetricsHook(RunDirectory(tmp_path))
    hook = ProgressHook(metrics, Console(file=text, width=120), UEFL, "UEFL on digits")
    hook.run_started(State({}), ROSTER, 10)
    reply = _reply(
        incoming__val__accuracy=0.25, incoming__val__entropy=1.0, trained__train__loss=2.5
    )
    for each in (metrics, hook):
        each.phase_ended(1, "train", {"s1a": reply})
    hook.site_failed(1, "train", "s2a", "no answer [in time]")
    hook.round_ended(State({}, 1, extended={"1": ["s1a"]}))
    lines = text.getvalue().splitlines()
    assert lines[0] == "UEFL on digits: 1 sites (s1a), 10 rounds"
    assert lines[1] == "round 1, train: going on without site s2a: no answer [in time]"
    assert lines[2].startswith(
        "round  1/10  train loss 2.500  began at val accuracy 0.250  entropy 1.000  "
        "new codewords for s1a  "
    )
    assert lines[2].endswith(" left")


def test_markers_move_the_bars_at_the_far_end_and_other_lines_do_not() -> None:
    stream = io.StringIO()
    near = MarkerBars(Console(file=stream))
    near.begin(3, 1)
    near.phase(2, "train", 9)
    near.reply(2, "train", "s1a")
    near.round_done(2)
    far = TerminalBars(Console(file=io.StringIO(), force_terminal=True))
    assert all(follow(line, far) for line in stream.getvalue().splitlines())
    rounds, sites = far.progress.tasks
    assert (rounds.total, rounds.completed) == (3, 2)
    assert (sites.total, sites.completed) == (9, 1)
    assert sites.fields["note"] == "round 2, train, s1a"
    near.stop()
    assert follow(stream.getvalue().splitlines()[-1], far)
    assert not follow("round 1/3  train loss 1.0", far)


def test_bars_are_drawn_on_a_terminal_marked_when_asked_and_absent_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = Console(file=io.StringIO(), force_terminal=False)
    monkeypatch.delenv(PROGRESS_VARIABLE, raising=False)
    assert type(choose_bars(plain)) is Bars
    assert isinstance(choose_bars(Console(file=io.StringIO(), force_terminal=True)), TerminalBars)
    monkeypatch.setenv(PROGRESS_VARIABLE, "1")
    assert isinstance(choose_bars(plain), MarkerBars)
