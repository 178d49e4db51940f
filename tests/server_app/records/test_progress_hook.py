"""The progress of real runs: true to their tables, and no run ends by it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message, MetricRecord

import fedsilo.engines.inline_engine
from fedsilo.core.errors import SiteError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.core.site_facts import SiteFacts
from fedsilo.engines.inline_engine import InlineGrid
from fedsilo.server_app.records import progress_hook
from fedsilo.server_app.records.progress import METRICS_FILE, Progress, read_progress
from fedsilo.server_app.records.progress_hook import ProgressHook
from fedsilo.server_app.records.recorder import Recorder
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.uefl import UEFL, UEFLState
from tests.server_app.records.test_recorder import reply

Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]


class _LastingGrid(InlineGrid):
    """A grid that is interrupted, or whose sites fail, after ``lives`` messages."""

    lives = 10**9
    fails = False

    def answer(self, message: Message) -> Message:
        type(self).lives -= 1
        if type(self).lives >= 0:
            return super().answer(message)
        if type(self).fails:
            return Message(Error(0, "no disk"), reply_to=message)
        raise KeyboardInterrupt


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], None]:
    """Let the next run end after so many answers: by an interrupt, or by failing sites."""

    def after(lives: int, fails: bool) -> None:
        monkeypatch.setattr(_LastingGrid, "lives", lives)
        monkeypatch.setattr(_LastingGrid, "fails", fails)
        monkeypatch.setattr(fedsilo.engines.inline_engine, "InlineGrid", _LastingGrid)

    return after


def _read(folder: Path) -> Progress:
    progress = read_progress(folder)
    assert progress is not None
    return progress


def _true(directory: RunDirectory) -> Progress:
    """Hold a run's progress against its tables."""
    progress, rows = _read(directory.path), directory.read_csv("traffic.csv")
    for site, said in progress.sites.items():
        own = [row for row in rows if row["site"] == site]
        assert said.bytes_up == sum(int(row["bytes_up"]) for row in own)
        assert said.bytes_down == sum(int(row["bytes_down"]) for row in own)
        assert said.seconds == pytest.approx(sum(float(r["seconds"]) for r in own), abs=0.01)
    return progress


def test_at_the_end_it_says_what_the_run_directory_says(tiny: Tiny, inline_run: InlineRun) -> None:
    values = tiny("fedavg", sample_clip_norm=1.0, noise_multiplier=6.0, max_epsilon=8.0)
    directory = inline_run(values)
    progress, summary = _true(directory), directory.read_json("summary.json")
    assert (progress.state, progress.round, progress.finished_rounds) == ("finished", 2, 2)
    assert progress.bytes() == summary["bytes"]
    spent = summary["privacy"]["guarantee"]["sites"]
    assert {s: said.epsilon for s, said in progress.sites.items()} == spent
    peaks = {site: said.peak_memory_bytes for site, said in progress.sites.items()}
    assert peaks == summary["peak-memory-bytes"]
    assert (directory.path / METRICS_FILE).read_text().count("# TYPE") > 8


def test_a_run_that_is_interrupted_says_so_and_goes_on_counting(
    tiny: Tiny, inline_run: InlineRun, ending: Callable[[int, bool], None], tmp_path: Path
) -> None:
    values = tiny("fedavg")
    ending(7, False)  # three hellos, a round, and one site of the second
    with pytest.raises(KeyboardInterrupt):
        inline_run(values, out=tmp_path)
    before = _read(tmp_path / "run")
    assert (before.state, before.round, before.finished_rounds) == ("interrupted", 2, 1)
    ending(10**9, False)
    progress = _true(inline_run({**values, "resume": True}, out=tmp_path))
    assert (progress.state, progress.finished_rounds) == ("finished", 2)


def test_a_run_that_fails_says_why(
    tiny: Tiny, inline_run: InlineRun, ending: Callable[[int, bool], None], tmp_path: Path
) -> None:
    ending(6, True)
    with pytest.raises(SiteError):
        inline_run(tiny("fedavg"), out=tmp_path)
    progress = _read(tmp_path / "run")
    assert progress.state == "failed"
    assert "no disk" in progress.why


def test_a_run_without_a_site_names_it(
    tiny: Tiny, inline_run: InlineRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []
    ended, answer = ProgressHook.round_ended, InlineGrid.answer

    def look(self: ProgressHook, state: State) -> None:
        seen.append(dict(self.progress.failed))
        ended(self, state)

    def without_metrics(self: InlineGrid, message: Message) -> Message:
        reply = answer(self, message)
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1002:
            reply.content["metrics"] = MetricRecord()
        return reply

    monkeypatch.setattr(ProgressHook, "round_ended", look)
    monkeypatch.setattr(InlineGrid, "answer", without_metrics)
    progress = _read(inline_run(tiny("fedavg", min_sites=2)).path)
    assert progress.left_out == 2
    assert seen == [{"s2a": "metric 'num-examples' is missing"}] * 2


@pytest.mark.parametrize("broken", ["write_progress", "join_names"])
def test_no_failure_of_it_reaches_the_run(
    tiny: Tiny,
    inline_run: InlineRun,
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    said: list[str] = []
    monkeypatch.setattr(progress_hook, broken, fail)
    log = logging.getLogger("flwr")
    monkeypatch.setattr(log, "warning", lambda text, *args: said.append(text % args))
    directory = inline_run(tiny("fedavg"))
    assert directory.read_json("summary.json")["rounds"] == 2
    assert len(said) == 1, "it is told once"
    assert "cannot be kept up to date (OSError: [Errno 28] No space left on device)" in said[0]


def test_a_run_that_leaves_nothing_leaves_no_progress(
    tiny: Tiny, inline_run: InlineRun, ending: Callable[[int, bool], None], tmp_path: Path
) -> None:
    ending(4, True)
    with pytest.raises(SiteError):
        inline_run(tiny("fedavg"), out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_hook_prints_a_line_a_round_with_measurements_and_time_left(tmp_path: Path) -> None:
    lines: list[str] = []
    directory, facts = RunDirectory(tmp_path), {"train": [1]}
    recorder = Recorder(directory)
    hook = ProgressHook(
        directory,
        CommonSettings(),
        "UEFL on digits",
        UEFL.marks,
        recorder,
        None,
        lines.append,
    )
    site = SiteFacts("s1a", "D1", (1, 16, 16), 10, facts, {"train": "x"})
    hook.run_started(State({}, 0), Participants({"s1a": site}, {"s1a": 5}), 10)
    measured = reply(
        incoming__val__accuracy=0.25, incoming__val__entropy=1.0, trained__train__loss=2.5
    )
    recorder.phase_ended(1, "train", {"s1a": measured})
    hook.site_failed(1, "train", "s2a", "no answer [in time]")
    hook.round_ended(UEFLState({}, 1, extended={"1": ("s1a",)}))
    assert lines[0] == "UEFL on digits: 1 site (s1a), 10 rounds"
    assert lines[1] == "round 1, train: continuing without site s2a: no answer [in time]"
    assert lines[2].startswith(
        "round  1/10  train loss 2.500  validation accuracy before training 0.250  entropy 1.000  "
        "new codewords for s1a  "
    )
    assert lines[2].endswith(" left")


def test_hook_says_after_which_round_a_run_is_resumed(tmp_path: Path) -> None:
    lines: list[str] = []
    directory = RunDirectory(tmp_path)
    hook = ProgressHook(
        directory,
        CommonSettings(),
        "FedAvg on digits",
        UEFL.marks,
        Recorder(directory),
        None,
        lines.append,
    )
    hook.run_started(State({}, 4), Participants({}, {}), 10)
    assert lines[1] == "resuming after round 4"
