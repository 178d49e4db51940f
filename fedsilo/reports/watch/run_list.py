"""Lists the run directories in a folder, and deletes some of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedsilo.core.errors import FedsiloError, RunDirectoryError
from fedsilo.core.one_line import one_line
from fedsilo.reports.watch.view import look_at
from fedsilo.server_app.records.progress import FILE
from fedsilo.server_app.records.run_directory import CONFIG, LOCK, RunDirectory, only_writer

State = Literal["finished", "running", "interrupted", "failed", "unreadable"]

_DEEPEST = 2  # levels of folders below the given one, as in runs/compared/fedavg-seed0


@dataclass(frozen=True)
class ListedRun:
    """A run directory in the list.

    Attributes:
        path: the run directory.
        state: ``interrupted`` if 'fedsilo resume' continues the run, also after a kill;
            ``unreadable`` if the directory is damaged or of another version of fedsilo.
        method, dataset: from the run's settings; empty if the run is unreadable.
        seed: the run's seed; None if the run is unreadable.
        rounds: finished and wanted rounds, such as ``12 of 30``.
        started: the time of the start, UTC, to the minute.
        bytes: the size of all files in the directory.
        note: why the run failed or cannot be read; otherwise empty.
    """

    path: Path
    state: State
    bytes: int
    method: str = ""
    dataset: str = ""
    seed: int | None = None
    rounds: str = ""
    started: str = ""
    note: str = ""

    def delete(self) -> None:
        """Delete the run directory with all its files.

        Raises:
            RunDirectoryError: the path is a link or not a run directory, or a process is writing to
                the directory. This error is also raised if the system cannot delete a file.
        """
        if self.path.is_symlink() or not _is_run(self.path):
            raise RunDirectoryError(f"{self.path} is not a run directory, so it is not deleted")
        # The lock keeps 'fedsilo resume' from starting in the directory while its files disappear
        with only_writer(RunDirectory(self.path), new=False):
            try:
                shutil.rmtree(self.path)
            except OSError as error:
                raise RunDirectoryError(
                    f"{self.path} cannot be deleted completely ({one_line(error, 100)}): check "
                    "whose files it has"
                ) from None

    def document(self) -> dict[str, Any]:
        """Return the run as a dictionary for JSON.

        The keys ``path``, ``state``, ``method``, ``dataset``, ``seed``, ``rounds``, ``started``,
        ``bytes`` and ``note`` have the values of the attributes with these names. Only ``path`` is
        converted, to a string.
        """
        return {
            "path": str(self.path),
            "state": self.state,
            "method": self.method,
            "dataset": self.dataset,
            "seed": self.seed,
            "rounds": self.rounds,
            "started": self.started,
            "bytes": self.bytes,
            "note": self.note,
        }


def list_runs(folders: Sequence[Path], wanted: Mapping[str, str | None]) -> list[ListedRun]:
    """List the run directories in folders, sorted by their start, the oldest first.

    Folders are searched down to two levels, without following links. A damaged run, or a run of
    another version, is listed as unreadable. Its start is unknown, so it comes before all other
    runs.

    Args:
        folders: run directories, or folders that contain run directories.
        wanted: name of an attribute of ``ListedRun`` -> the value that a listed run must have. For
            None, any value will do.

    Raises:
        RunDirectoryError: a folder does not exist.
        OSError: a folder cannot be read.
    """
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise RunDirectoryError(f"there is no folder {folder}: name a folder of runs")
        for path in find_runs(folder):
            listed = read_listed(path, size_of(path))
            if all(value in (None, getattr(listed, key)) for key, value in wanted.items()):
                found.append(listed)
    return sorted(found, key=lambda run: (run.started, str(run.path)))


def _is_run(path: Path) -> bool:
    """Tell whether a folder has a run's lock file, and also its settings or its progress."""
    has_file = any((path / name).is_file() for name in (CONFIG, FILE))
    return has_file and (path / LOCK).is_file()


def find_runs(folder: Path, levels: int = _DEEPEST) -> Iterator[Path]:
    """Yield the run directories in a folder, down to ``levels`` levels below it.

    The search does not enter run directories and links. If ``folder`` is itself a run directory,
    only it is yielded. A folder that disappears during the search is left out.

    Raises:
        OSError: a folder cannot be read.
    """
    if _is_run(folder):
        yield folder
        return
    if not levels:
        return
    try:
        inside = sorted(folder.iterdir())
    except FileNotFoundError:
        return
    for path in inside:
        # A link could lead to a run of somebody else, which --delete must not reach
        if path.is_dir() and not path.is_symlink():
            yield from find_runs(path, levels - 1)


def read_listed(path: Path, size: int = 0) -> ListedRun:
    """Read the state of a run directory for the list of runs.

    If the directory cannot be read, the state is "unreadable" and ``note`` has the error. For a
    failed run, ``note`` has the reason. If the run's process was killed, the state is
    "interrupted".

    Args:
        path: the run directory.
        size: the size of the directory in bytes, which is only copied to the result.
    """
    try:
        seen = look_at(path)
    except (FedsiloError, OSError) as error:
        return ListedRun(path, "unreadable", size, note=str(error))
    here = seen.progress
    state: State = here.state
    if seen.gone:
        state = "interrupted"
    return ListedRun(
        path,
        state,
        size,
        method=here.method,
        dataset=here.dataset,
        seed=here.seed,
        rounds=f"{here.finished_rounds} of {here.rounds}",
        started=f"{here.started:%Y-%m-%d %H:%M}",
        note=here.why,
    )


def size_of(folder: Path) -> int:
    """Return the size in bytes of all files in a folder and its subfolders.

    A symbolic link has its own size, not that of its target. A file that vanishes during the count
    is left out.
    """
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            # A file may vanish while a run is writing
            try:
                total += os.lstat(Path(place, name)).st_size
            except OSError:
                continue
    return total
