"""Looking at run directories: what goes on, what has ended without a word, what is none."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedsilo.core.errors import RunDirectoryError
from fedsilo.reports.watch.view import look_at, newest_run
from fedsilo.server_app.records.progress import FILE, Progress, SiteProgress, bytes_text, clock


def written(folder: Path, **changes: Any) -> Path:
    """Write the progress of a run of this process and return its directory."""
    usual: dict[str, Any] = {
        "run": folder.name,
        "title": "FedAvg on table, seed 1",
        "method": "fedavg",
        "dataset": "table",
        "seed": 1,
        "pid": os.getpid(),
        "process_started": psutil.Process().create_time(),
        "started": datetime.now(UTC),
        "updated": datetime.now(UTC),
        "round": 2,
        "rounds": 3,
        "finished_rounds": 1,
        "phase": "train",
        "phase_started": datetime.now(UTC),
        "asked": ["east", "north", "south"],
        "answered": ["north"],
        "away": ["south"],
        "seconds": 70.0,
        "seconds_left": 65.0,
        "sites": {"north": SiteProgress(bytes_down=1_500_000, bytes_up=20, epsilon=1.5)},
        "max_epsilon": 8.0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(Progress(**(usual | changes)).model_dump_json(indent=2))
    return folder


def test_a_run_that_goes_on_is_one_line(tmp_path: Path) -> None:
    watched = look_at(written(tmp_path / "trial"))
    assert watched.line() == (
        "trial: running, round 2 of 3, train: 1 of 3 answered, away: south, 1.5 MB down, 20 B up, "
        "epsilon 1.50 of 8, 1:10, 1:05 left"
    )
    assert not watched.over


def test_a_process_that_has_ended_is_known(tmp_path: Path) -> None:
    watched = look_at(written(tmp_path / "trial", process_started=1.0))
    assert watched.over
    assert "was killed: 'fedsilo resume" in watched.line()
    assert " left" not in watched.line()


def test_of_another_machine_silence_is_told(tmp_path: Path) -> None:
    there: dict[str, Any] = {"host": "another", "pid": 1, "process_started": 1.0}
    assert "trial: running" in look_at(written(tmp_path / "trial", **there)).line()
    old = look_at(
        written(tmp_path / "trial", **there, updated=datetime.now(UTC) - timedelta(seconds=100))
    )
    assert "nothing written for a minute" in old.line()
    assert not old.over


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("finished", "trial: finished, round 2 of 3, 1.5 MB down"),
        ("failed", "failed: site south"),
        ("interrupted", "interrupted: 'fedsilo resume"),
    ],
)
def test_an_end_is_told_and_no_time_is_left(tmp_path: Path, state: str, told: str) -> None:
    watched = look_at(written(tmp_path / "trial", state=state, why="site south: gone"))
    assert told in watched.line()
    assert "left" not in watched.line()
    assert watched.over


def test_what_is_no_run_directory_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="there is no run directory"):
        look_at(tmp_path / "nowhere")
    with pytest.raises(RunDirectoryError, match="it is not a run directory"):
        look_at(tmp_path)


def test_the_newest_run_is_the_one_written_last(tmp_path: Path) -> None:
    assert newest_run(tmp_path / "runs") is None
    for number, name in enumerate(("old", "new", "older")):
        written(tmp_path / name)
        os.utime(tmp_path / name / FILE, (0, (5, 9, 1)[number]))
    assert newest_run(tmp_path) == tmp_path / "new"


def test_sizes_and_times_in_words() -> None:
    sizes = {0: "0 B", 999: "999 B", 999_600: "1 MB", 1_500_000: "1.5 MB", 2e15: "2e+03 TB"}
    assert {number: bytes_text(number) for number in sizes} == sizes
    assert [clock(s) for s in (0, 59.6, 3605)] == ["0:00", "1:00", "1:00:05"]
