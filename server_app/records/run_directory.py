"""The run directory, a contract that tools and tests read; every file is complete or absent.

``config.toml``, ``silos.json``, ``metrics.csv``, ``traffic.csv``, ``summary.json``,
``privacy.json``, ``curves.png``, ``checkpoints/`` and ``model.safetensors``; personal models are
kept by their sites, in simulation in ``sites/<site>/``.
"""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.datasets.io.text_files import file_fault
from fedsilo.models.contract.errors import FedsiloError, RunDirectoryError
from fedsilo.models.contract.messages import RUN_NAME, RUN_NAME_WORDS
from fedsilo.models.contract.one_line import as_word, one_line, shown
from fedsilo.models.contract.versions import git_revision
from fedsilo.server_app.config.settings import RUN_FORMAT, RunSettings, grouped
from fedsilo.server_app.records.forms import (
    Content,
    check_columns,
    check_table,
    read_content,
)

if TYPE_CHECKING:  # PyTorch comes with it
    from fedsilo.strategies.meeting.participants import Participants

CONFIG, SUMMARY, SILOS = "config.toml", "summary.json", "silos.json"
CUT, STANDARDISATION, LOCK = "cut.json", "standardisation.json", ".lock"
ENDING = ".ending"  # is there while the documents that follow summary.json are written
MODEL, BEST = "model.safetensors", "best.safetensors"  # of the last round, of the best

# A larger file is not read as text
_MOST_BYTES = 2**30
_PACKAGES = ("flwr", "torch", "torchvision", "timm", "ray", "numpy", "scikit-learn", "grpcio")


@dataclass(frozen=True)
class RunDirectory:
    """The folder of one run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def file(self, name: str) -> Path:
        """Return the path of a file to read.

        Raises:
            RunDirectoryError: it is a pipe or a folder, too large, or a link out of the directory.
        """
        path = self.path / name
        refuse_outside(self.path, path)
        fault = file_fault(path, _MOST_BYTES)
        if fault or path.is_dir():
            raise RunDirectoryError(f"{path} {fault or 'is a folder'}: restore the run's own file")
        return path

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file."""
        write_atomically(self.path / name, json.dumps(content, indent=2, sort_keys=False) + "\n")

    def read_json(self, name: str) -> Any:
        """Read a JSON file.

        Raises:
            RunDirectoryError: it is missing, as the run has not ended, or has another form.
        """
        path = self.file(name)
        if not path.exists():
            raise RunDirectoryError(
                f"{path} is not there: the run has not ended, or this is not a run directory; "
                "resume it or name another"
            )
        try:
            return read_content(path.read_text(encoding="utf-8"), path)
        except (OSError, ValueError, RecursionError) as error:
            reason = one_line(error, 100)
            raise RunDirectoryError(f"{path} is damaged ({reason}): start a new run") from None

    def read_csv(self, name: str) -> list[dict[str, str]]:
        """Read a CSV file as one mapping a row; errors as ``read_json``."""
        path = self.file(name)
        try:
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                check_columns(name, reader.fieldnames or (), str(path))
                rows = [Content(cells.items(), path) for cells in reader]
        except OSError as error:
            raise RunDirectoryError(f"{path}: {error.strerror}") from None
        except (ValueError, csv.Error) as error:
            raise RunDirectoryError(f"{path} is damaged ({one_line(error, 100)})") from None
        check_table(rows, str(path))
        return list[dict[str, str]](rows)

    def has_ended(self) -> bool:
        """Tell whether nothing of the run is missing but perhaps its pictures."""
        return (self.path / SUMMARY).is_file() and not (self.path / ENDING).is_file()


def refuse_outside(run_dir: Path, path: Path) -> None:
    """Refuse a file of a run that is a link to somewhere outside of the run directory.

    Whoever sent the directory would choose which of the reader's own files are read or written.

    Raises:
        RunDirectoryError: it is such a link, or a link that leads nowhere or to itself.
    """
    if not path.is_symlink():
        return
    try:
        is_inside = path.resolve(strict=True).is_relative_to(run_dir.resolve())
    except (OSError, RuntimeError):
        is_inside = False
    if not is_inside:
        raise RunDirectoryError(
            f"{path} is a link to outside of the run directory: put a copy of the file there"
        )


def refuse_links(run_dir: Path) -> None:
    """Refuse a run directory in which a file or folder of the contract leads outside.

    Raises:
        RunDirectoryError: names the link.
    """
    for folder in (run_dir, run_dir / "checkpoints", run_dir / "sites"):
        if folder.is_dir():
            for path in folder.iterdir():
                refuse_outside(run_dir, path)


def runs_folder(out: str) -> Path:
    """Return the folder of run directories: ``out``, or $FEDSILO_RUNS, or ~/.fedsilo/runs.

    Raises:
        RunDirectoryError: the path is relative, which means nothing inside a Flower app.
    """
    folder = Path(out or os.environ.get("FEDSILO_RUNS", "") or "~/.fedsilo/runs").expanduser()
    if not folder.is_absolute():
        raise RunDirectoryError(
            f"setting 'out' is '{folder}'; inside a Flower app it must be an absolute path"
        )
    return folder


def named(settings: RunSettings) -> RunSettings:
    """Return the settings with a run name: the given one, or one that no earlier run has."""
    common = settings.common
    if common.run_name:
        return settings
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    of = f"{common.method}-{common.dataset}".replace(":", "-")  # a plug's
    name = f"{of}-seed{common.seed}-{stamp}-{os.getpid()}"
    return dataclasses.replace(settings, common=dataclasses.replace(common, run_name=name))


def with_free_name(settings: RunSettings) -> RunSettings:
    """Return the settings of a new run; a name that is taken gets a number: ``hearts-2``."""
    common = settings.common
    path = runs_folder(common.out) / common.run_name
    if common.resume or not RUN_NAME.fullmatch(common.run_name) or not _is_taken(path):
        return settings
    names = (f"{common.run_name}-{number}" for number in count(2))
    free = next(name for name in names if not _is_taken(path.with_name(name)))
    unfinished = (path / CONFIG).is_file() and not RunDirectory(path).has_ended()
    also = f", unfinished ('fedsilo resume {as_word(path)}' continues it)" if unfinished else ""
    print(f"fedsilo: {path} exists{also}; this run is {free}")
    return dataclasses.replace(settings, common=dataclasses.replace(common, run_name=free))


def open_run_directory(out: str, run_name: str, resume: bool) -> RunDirectory:
    """Return the directory of a run that is new or to be resumed; nothing is written yet.

    Raises:
        RunDirectoryError: a new run's directory exists, or that of a run to resume does not.
    """
    if not RUN_NAME.fullmatch(run_name):
        raise RunDirectoryError(
            f"setting 'run-name' is {shown(run_name)}; it must be {RUN_NAME_WORDS}"
        )
    path = runs_folder(out) / run_name
    if not resume and _is_taken(path):
        raise RunDirectoryError(
            f"run directory {path} exists: choose another 'run-name', set "
            "'resume' to true to continue it, or remove it"
        )
    if resume and not path.is_dir():
        raise RunDirectoryError(
            f"there is no run directory {path} to resume: check 'out' and 'run-name'"
        )
    refuse_links(path)
    return RunDirectory(path)


def _is_taken(path: Path) -> bool:
    """Return whether there is more than what is written before config.toml makes it a run."""
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    begun = {name for name in names if name.startswith(".") and name.endswith(".part")}
    return path.exists() and not (LOCK in names and names <= {LOCK, SILOS, CUT, *begun})


def config_document(settings: RunSettings, launch: Mapping[str, Any]) -> str:
    """Return config.toml: every resolved setting, how the run was launched, and the versions."""
    document: dict[str, Any] = {"format": RUN_FORMAT} | grouped(settings.as_mapping())
    if launch:
        document["launch"] = dict(launch)
    packages = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    document["environment"] = {
        "fedsilo-revision": git_revision(),
        "python": platform.python_version(),
        "packages": packages,
    }
    return tomli_w.dumps(document)


def silos_document(participants: Participants) -> dict[str, Any]:
    """Return silos.json: per site its distribution, sizes, labels, fingerprints, rows left out.

    For hospitals it also has their software and device, and with 'site-weights' the training
    samples that were agreed.
    """
    agreed = participants.agreed_samples()
    return {
        site: {
            "distribution": facts.distribution,
            "sizes": facts.sizes(),
            "label_counts": facts.label_counts,
            "fingerprints": facts.fingerprints,
            "dropped": facts.dropped,
            "schema": facts.schema,
            "classes": list(facts.class_names),
            "backbone": facts.backbone,
            **({"software": facts.software} if facts.software else {}),
            **({"agreed": agreed[site]} if site in agreed else {}),
        }
        for site, facts in participants.facts.items()
    }


@contextmanager
def only_writer(directory: RunDirectory, new: bool) -> Iterator[None]:
    """Hold the run directory for this process; it is created if it does not exist.

    A new run's directory is removed if the block fails before the first checkpoint.

    Raises:
        RunDirectoryError: another process writes to it, or it is to be ``new`` and holds a run.
    """
    directory.path.mkdir(parents=True, exist_ok=True)
    # A link would let whoever sent the directory choose a file of ours that is emptied
    handle = os.open(directory.path / LOCK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with os.fdopen(handle, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryError(
                f"another process is writing to {directory.path}: wait for it or end it"
            ) from None
        if new and (directory.path / CONFIG).exists():
            raise RunDirectoryError(f"another process has begun a run in {directory.path}")
        try:
            yield
        except FedsiloError:
            if new and not any(directory.checkpoints.glob("*")):
                shutil.rmtree(directory.path)
            raise
