"""The recorder's two files, by hand."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import CheckpointError, RunDirectoryError
from fedsilo.core.messages import NUM_EXAMPLES, PEAK_MEMORY, SAMPLES, SECONDS, STEPS
from fedsilo.server_app.records.recorder import GrowingCsv, Recorder
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.wire.reply import Reply

HEADER = ("round", "site")
Rows = list[list[str]]
cells = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=5)
rows = st.lists(st.lists(cells, min_size=2, max_size=2), max_size=4)


def _file(folder: Path) -> GrowingCsv:
    return GrowingCsv(folder / "x.csv", HEADER)


def test_settled_rows_stay_and_open_ones_are_replaced(tmp_path: Path) -> None:
    file = _file(tmp_path)
    file.write([(0, "a")], [(1, "long open row"), (1, "b")])
    assert file.path.read_text() == "round,site\n0,a\n1,long open row\n1,b\n"
    file.write([(1, "b")], [(2, "c")])
    assert file.path.read_text() == "round,site\n0,a\n1,b\n2,c\n"
    assert list(file.rows()) == [["0", "a"], ["1", "b"]]


@given(parts=st.lists(st.tuples(rows, rows), min_size=1, max_size=4), died=st.integers(0, 3))
def test_a_resumed_file_ends_as_one_written_in_one_go(
    parts: list[tuple[Rows, Rows]], died: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, other = tmp_path_factory.mktemp("grown"), tmp_path_factory.mktemp("whole")
    file, checkpoint = _file(folder), _file(folder).final
    for number, (settled, still_open) in enumerate(parts):
        file.write(settled, still_open)
        if number == died:  # written, but the checkpoint that knows of it is not
            file = _file(folder)
            file.restore(checkpoint)
            file.write(settled, still_open)
        checkpoint = file.final
    whole = _file(other)
    whole.write([row for settled, _ in parts for row in settled], parts[-1][1])
    assert file.path.read_bytes() == whole.path.read_bytes()
    assert list(file.rows()) == [row for settled, _ in parts for row in settled]


@pytest.mark.parametrize("harm", ["round,site\n0,b\n", "round,site\n", None])
def test_a_file_that_was_altered_is_not_gone_on_with(harm: str | None, tmp_path: Path) -> None:
    file = _file(tmp_path)
    file.write([(0, "a")])
    file.path.unlink()
    if harm is not None:
        file.path.write_text(harm)
    with pytest.raises(CheckpointError, match="was altered") as told:
        _file(tmp_path).restore(file.final)
    assert "\n" not in str(told.value)


def test_a_file_that_goes_while_the_run_is_on_is_told_in_a_line(tmp_path: Path) -> None:
    file = _file(tmp_path)
    file.write([(0, "a")])
    file.path.write_text("round")
    with pytest.raises(RunDirectoryError, match="it is shorter than it was"):
        file.write([(1, "b")])
    file.path.unlink()
    with pytest.raises(RunDirectoryError, match="No such file"):
        file.write([(1, "b")])


def reply(site: str = "s1a", **metrics: float) -> Reply:
    """Return a reply whose metrics are those given, ``__`` for ``.``, with seconds and memory."""
    named = {key.replace("__", "."): value for key, value in metrics.items()}
    fixed = {NUM_EXAMPLES: 4, SECONDS: 1.5, PEAK_MEMORY: 1000, STEPS: 3, SAMPLES: 40}
    return Reply(site, metrics={**fixed, **named}, bytes_down=10, bytes_up=3)


def test_recorder_dates_incoming_measurements_a_round_back_and_trained_ones_not(
    tmp_path: Path,
) -> None:
    hook = Recorder(RunDirectory(tmp_path))
    measured = reply(incoming__test__accuracy=0.1, trained__train__loss=2.0)
    hook.phase_ended(1, "train", {"s1a": measured})
    hook.round_ended(State({}, 1))
    hook.phase_ended(1, "evaluate", {"s1a": reply(incoming__test__accuracy=0.5)})
    hook.run_ended(State({}, 1))
    assert (tmp_path / "metrics.csv").read_text() == (
        "round,site,split,metric,value\n"
        "0,s1a,test,accuracy,0.1\n"
        "1,s1a,test,accuracy,0.5\n"
        "1,s1a,train,trained-loss,2.0\n"
    )
    assert hook.values(1, "test") == {"s1a": {"accuracy": 0.5}}
    assert hook.values(1, "train", trained=True) == {"s1a": {"loss": 2.0}}
    assert hook.written[0] == [[1, "s1a", "test", "accuracy", 0.5]], "what the last writing added"


def test_recorder_takes_of_special_phases_the_traffic_alone(tmp_path: Path) -> None:
    hook = Recorder(RunDirectory(tmp_path))
    hook.phase_ended(1, "uncertainty", {"s1a": reply(incoming__val__entropy=0.5)})
    hook.round_ended(State({}, 1))
    assert hook.open == []
    assert (tmp_path / "traffic.csv").read_text() == (
        "round,phase,site,bytes_down,bytes_up,seconds,steps,samples\n"
        "1,uncertainty,s1a,10,3,1.5,3,40\n"
    )
    assert hook.totals() == {"down": 10, "up": 3}
    assert hook.sites == {"s1a": (10, 3, 1.5)}
    assert hook.peak_memory == {"s1a": 1000}


def test_recorder_restores_what_state_returned(tmp_path: Path) -> None:
    one, other = Recorder(RunDirectory(tmp_path)), Recorder(RunDirectory(tmp_path))
    one.phase_ended(1, "train", {"s1a": reply(incoming__test__accuracy=0.1)})
    one.answer_failed(1, "train", "s2a", "no-answer", "gone")
    one.round_ended(State({}, 1))
    other.restore(json.loads(json.dumps(one.state())))
    assert other.state() == one.state()
    entry = {"round": 1, "phase": "train", "site": "s2a", "code": "no-answer"}
    assert other.failures.entries == [{**entry, "cause": "gone"}]
    assert other.failures.in_summary() == [{**entry, "reason": "gone"}]


def test_a_file_of_an_earlier_version_continues_with_its_own_columns(tmp_path: Path) -> None:
    before = GrowingCsv(tmp_path / "traffic.csv", ("round", "site"))
    before.write([(1, "a")])
    after = GrowingCsv(before.path, ("round", "site", "steps"))
    after.restore(before.final)
    after.write([(2, "b", 9)])
    assert before.path.read_text() == "round,site\n1,a\n2,b\n"


def _rounds(hook: Recorder, first: int, last: int) -> None:
    for round_ in range(first, last + 1):
        measured = reply(incoming__test__accuracy=round_ / 10, trained__train__loss=1 / round_)
        hook.phase_ended(round_, "train", {"s1a": measured})
        hook.round_ended(State({}, round_))


def test_recorder_continues_a_checkpoint_to_the_same_files(tmp_path: Path) -> None:
    complete, resumed = RunDirectory(tmp_path / "complete"), RunDirectory(tmp_path / "resumed")
    _rounds(Recorder(complete), 1, 5)
    before = Recorder(resumed)
    _rounds(before, 1, 3)
    known = json.loads(json.dumps(before.state()))
    _rounds(before, 4, 4)  # written, and then it dies before its checkpoint
    assert len(json.dumps(known)) < 700, "a checkpoint holds no rows of rounds that are over"
    after = Recorder(resumed)
    after.restore(known)
    _rounds(after, 4, 5)
    for name in ("metrics.csv", "traffic.csv"):
        assert (resumed.path / name).read_bytes() == (complete.path / name).read_bytes()
    assert after.totals() == {"down": 50, "up": 15}
    assert after.sites["s1a"][2] == 7.5
    assert after.values(4, "test") == {"s1a": {"accuracy": 0.5}}
