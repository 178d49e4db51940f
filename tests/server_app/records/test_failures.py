"""failures.jsonl: what a run did without survives the process that saw it."""

import json
from pathlib import Path

import pytest

from fedsilo.core.errors import RunDirectoryError
from fedsilo.server_app.records.failures import FAILURES, FailureLog, read_failures
from fedsilo.server_app.records.recorder import Recorder
from fedsilo.server_app.records.run_directory import RunDirectory


def test_a_run_without_failures_has_no_file(tmp_path: Path) -> None:
    assert FailureLog(RunDirectory(tmp_path)).entries == []
    assert list(tmp_path.iterdir()) == []


def test_each_failure_is_a_line_and_a_later_process_continues_the_file(tmp_path: Path) -> None:
    first = FailureLog(RunDirectory(tmp_path))
    first.add(2, "train", "north", "no-answer", "no answer\nin time")
    first.add(3, "", "", "data", "the disk is full")
    second = FailureLog(RunDirectory(tmp_path))
    second.add(2, "train", "north", "no-answer", "no answer\nin time")  # the round is repeated
    second.add(4, "evaluate", "south", "withheld", "see its log")
    lines = (tmp_path / FAILURES).read_text().splitlines()
    assert [list(json.loads(line)) for line in lines] == [
        ["round", "phase", "site", "code", "cause"]
    ] * 3
    assert read_failures(RunDirectory(tmp_path)) == second.entries
    assert [entry["round"] for entry in second.entries] == [2, 3, 4]
    assert second.entries[0]["cause"] == "no answer in time"


def test_failures_of_a_run_that_an_earlier_version_began_are_taken_over(tmp_path: Path) -> None:
    recorder = Recorder(RunDirectory(tmp_path))
    state = recorder.state()
    state["failures"] = [{"round": 1, "phase": "train", "site": "north", "reason": "gone"}]
    recorder.restore(json.loads(json.dumps(state)))
    assert recorder.failures.in_summary() == [
        {"round": 1, "phase": "train", "site": "north", "code": "site", "reason": "gone"}
    ]
    assert read_failures(RunDirectory(tmp_path)) == recorder.failures.entries


@pytest.mark.parametrize("text", ["{", "[1]", '{"round": 1}', "3", "null"])
def test_a_damaged_file_is_named_with_its_line(text: str, tmp_path: Path) -> None:
    FailureLog(RunDirectory(tmp_path)).add(1, "train", "north", "site", "gone")
    with (tmp_path / FAILURES).open("a") as file:
        file.write(f"{text}\n")
    with pytest.raises(RunDirectoryError, match=r"failures\.jsonl, line 2 is damaged"):
        read_failures(RunDirectory(tmp_path))


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    log = FailureLog(RunDirectory(run))
    other.write_text("")
    (run / FAILURES).symlink_to(other)
    with pytest.raises(RunDirectoryError, match="cannot append"):
        log.add(1, "train", "north", "site", "gone")
    assert other.read_text() == ""
    assert log.entries == []
    (run / FAILURES).unlink()
    log.add(1, "train", "north", "site", "gone")  # what was not written is not taken for written
    assert read_failures(RunDirectory(run)) == log.entries
