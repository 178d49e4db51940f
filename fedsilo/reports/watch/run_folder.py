"""The runs in a folder, by the names that pages link to, and the files of a run that pages show."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedsilo.core.errors import RunDirectoryError
from fedsilo.core.files.atomic_files import open_regular
from fedsilo.core.one_line import quote_value
from fedsilo.reports.watch.measured import MeasuredRuns
from fedsilo.reports.watch.run_list import ListedRun, find_runs, read_listed
from fedsilo.reports.watch.view import Look, View, look_at_run
from fedsilo.server_app.records.progress import FILE
from fedsilo.server_app.records.run_directory import CONFIG, LOCK, SUMMARY

# The files that pages show: pictures and reports. Tables have metrics that no page may show
MEDIA_TYPES: Mapping[str, str] = {
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".pdf": "application/pdf",
    ".html": "text/html; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
}
_MOST_BYTES = 2**26  # a larger file is not read into memory


@dataclass(frozen=True)
class NamedRun:
    """A run with the name by which pages link to it: its path in the folder, with slashes."""

    name: str
    run: ListedRun


class RunFolder:
    """The runs in ``folder``, or the one run whose directory it is.

    Attributes:
        folder: the folder, which may disappear and come back.
        measured: the metrics of the runs.
        was_listed: whether a page has listed the runs before.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().resolve()
        self.measured = MeasuredRuns()
        self.was_listed = False

    def paths(self) -> dict[str, Path]:
        """Find the runs in the folder, down to two levels below it.

        If the folder is itself a run directory, it is the only run, named by the last part of its
        path.

        Returns:
            Name -> run directory. A name is the path inside the folder, with slashes.

        Raises:
            RunDirectoryError: the folder does not exist or cannot be read.
        """
        if not self.folder.is_dir():
            raise RunDirectoryError(f"there is no folder {self.folder}: name a folder of runs")
        if is_run_directory(self.folder):
            return {self.folder.name: self.folder}
        found = {}
        try:
            for path in find_runs(self.folder):
                found[path.relative_to(self.folder).as_posix()] = path
        except OSError as error:
            raise RunDirectoryError(
                f"{error.filename} cannot be read ({error.strerror}): check whose folder it is"
            ) from None
        return found

    def find(self, name: str) -> Path:
        """Return the directory of the run that ``paths`` lists under this name.

        Raises:
            RunDirectoryError: the folder has no such run, or cannot be read.
        """
        # A name is only looked up, and never becomes part of a path
        path = self.paths().get(name)
        if path is None:
            raise RunDirectoryError(
                f"{self.folder} has no run {quote_value(name)}: it was removed, or its name is "
                "another"
            )
        return path

    def runs(self) -> list[NamedRun]:
        """List all runs by their start, from the newest to the oldest.

        Unreadable runs are at the end.

        Raises:
            RunDirectoryError: the folder does not exist or cannot be read.
        """
        named = [NamedRun(name, read_listed(path)) for name, path in self.paths().items()]
        return sorted(named, key=lambda one: (one.run.started, one.name), reverse=True)

    def files(self, name: str) -> list[str]:
        """Return the sorted names of a run's pictures and reports.

        These are the files directly in the run directory that end with .png, .svg, .pdf, .html or
        .md. Symbolic links are left out.

        Raises:
            RunDirectoryError: the folder has no such run, or cannot be read.
        """
        return sorted(_shown_files(self.find(name)))

    def read_file(self, name: str, file: str) -> bytes:
        """Return the content of one of a run's pictures or reports, named as in ``files``.

        Raises:
            RunDirectoryError: the folder has no such run, or the run has no such picture or report.
                This error is also raised if the file cannot be read, is a link, or is larger than
                64 MiB.
        """
        path = self.find(name)
        if file not in _shown_files(path):
            raise RunDirectoryError(f"{path} has no picture or report {quote_value(file)}")
        try:
            # Between the list and here, the file may have become a link or a pipe
            with os.fdopen(open_regular(path / file, os.O_RDONLY), "rb") as opened:
                # One byte more than allowed is enough to see that the file is too large
                content = opened.read(_MOST_BYTES + 1)
        except OSError as error:
            raise RunDirectoryError(f"{path / file} cannot be read: {error.strerror}") from None
        if len(content) > _MOST_BYTES:
            raise RunDirectoryError(f"{path / file} is too large to be shown: open it as a file")
        return content


def _shown_files(run_dir: Path) -> list[str]:
    """Return the names of the pictures and reports in a run directory, in any order.

    These are the files with the endings .png, .svg, .pdf, .html and .md. Subfolders are not
    searched, and symbolic links are left out. If the directory cannot be read, the list is empty.
    """
    names = []
    with suppress(OSError), os.scandir(run_dir) as entries:
        for entry in entries:
            suffix = Path(entry.name).suffix
            if suffix in MEDIA_TYPES and entry.is_file(follow_symlinks=False):
                names.append(entry.name)
    return names


def look_at_folder(folder: Path) -> View:
    """Read the states of all runs in a folder, to show them as a list.

    The folder is searched down to two levels below it. The run that started last comes first.
    Unreadable runs are at the end.

    Raises:
        RunDirectoryError: the folder does not exist or cannot be read.
    """
    rows = []
    for one in RunFolder(folder).runs():
        run = one.run
        known = [text or "-" for text in (run.method, run.dataset, run.rounds, run.started)]
        rows.append((one.name, run.state, *known, run.note))
    return View(str(folder), None, folder=folder, runs=tuple(rows))


def is_run_directory(path: Path) -> bool:
    """Tell whether a folder is a run directory rather than a folder of runs.

    A folder with any file of a run is a run directory. So a damaged run is reported as damaged.
    """
    return any((path / name).exists() for name in (FILE, CONFIG, LOCK, SUMMARY))


def look_for(path: Path) -> Look:
    """Choose how to look at a folder: as a run directory, or as a folder of runs."""
    if path.is_dir() and not is_run_directory(path):
        return partial(look_at_folder, path)
    return partial(look_at_run, path)


def merge_metrics(folder: RunFolder) -> str:
    """Build the text with the metrics of all runs in state "running", in Prometheus's format.

    A metric's description appears only once, and is followed by the samples of all these runs.

    Raises:
        RunDirectoryError: the folder does not exist or cannot be read.
    """
    headings: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for one in folder.runs():
        if one.run.state != "running":
            continue
        for line in look_at_run(one.run.path).metrics_text().splitlines():
            # '# HELP name text' and '# TYPE name kind', then 'name{labels} value'
            words = line.split()
            if line.startswith("#"):
                heading = headings.setdefault(words[2], [])
                if line not in heading:
                    heading.append(line)
            else:
                samples.setdefault(line.partition("{")[0], []).append(line)
    lines = []
    for name, found in samples.items():
        lines += [*headings.get(name, ()), *found]
    return "".join(f"{line}\n" for line in lines)
