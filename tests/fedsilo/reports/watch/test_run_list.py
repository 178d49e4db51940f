"""The list of runs: which folders it finds, what it says of them, and what it deletes."""

import fcntl
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import fedsilo
from fedsilo.cli.main import main
from fedsilo.core.errors import RunDirectoryError
from fedsilo.server_app.records.progress import Progress


def make_run(path: Path, **changes: Any) -> Path:
    """Write the files by which a run directory is listed."""
    path.mkdir(parents=True)
    moment = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    facts: dict[str, Any] = {
        "run": path.name,
        "title": "FedAvg",
        "method": "fedavg",
        "dataset": "digits",
        "seed": 3,
        "state": "finished",
        "pid": os.getpid(),
        "process_started": 0.0,
        "started": moment,
        "updated": moment,
        "rounds": 5,
        "finished_rounds": 5,
    }
    (path / "progress.json").write_text(Progress(**(facts | changes)).model_dump_json())
    (path / "config.toml").write_text("format = 1\n")
    (path / ".lock").touch()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_run(tmp_path / "one")
    make_run(tmp_path / "swept" / "two", method="mix", state="failed", why="diverged")
    make_run(tmp_path / "killed", state="running", finished_rounds=2)  # this process began later
    make_run(tmp_path / "old")
    (tmp_path / "old" / "progress.json").write_text('{"version": 9}')
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.toml").write_text("of somebody else")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    return tmp_path


def states(found: list[Any]) -> dict[str, str]:
    return {run.path.name: run.state for run in found}


def test_runs_are_found_two_levels_deep_with_their_states(folder: Path) -> None:
    found = fedsilo.list_runs(folder)
    assert states(found) == {
        "old": "unreadable",
        "killed": "interrupted",
        "one": "finished",
        "two": "failed",
    }
    (two,) = fedsilo.list_runs(folder, method="mix")
    assert (two.rounds, two.note, two.seed) == ("5 of 5", "diverged", 3)
    assert states(fedsilo.list_runs([folder / "one"])) == {"one": "finished"}
    assert fedsilo.list_runs(folder, state="running") == []


def test_only_listed_runs_are_deleted_and_only_with_consent(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", str(folder), "--state", "failed", "--delete"]) == 1
    assert "--yes" in capsys.readouterr().err
    assert (folder / "swept" / "two").is_dir()
    assert main(["runs", str(folder), "--state", "failed", "--delete", "--yes"]) == 0
    assert not (folder / "swept" / "two").exists()
    assert (folder / "one" / "progress.json").is_file()
    assert main(["runs", str(folder), "--json", "--method", "fedavg"]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(printed[printed.index("[\n") :])
    assert [row["state"] for row in rows] == ["interrupted", "finished"]


def test_what_is_written_or_linked_is_not_deleted(folder: Path) -> None:
    (one,) = fedsilo.list_runs(folder / "one")
    with (folder / "one" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunDirectoryError, match="another process is writing"):
            one.delete()
    (linked,) = fedsilo.list_runs(folder / "link")
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        linked.delete()
    assert (folder / "one" / "config.toml").is_file()


def test_a_folder_that_is_missing_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "/nowhere"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
