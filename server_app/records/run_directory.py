"""The run directory, whose layout tools and tests rely on. Every file is complete or absent.

The files are ``config.toml``, ``silos.json``, ``metrics.csv``, ``traffic.csv``, ``summary.json``,
``privacy.json``, ``curves.png``, ``checkpoints/`` and ``model.safetensors``. Sites keep their
personal models; in a simulation these are in ``sites/<site>/``.
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fedsilo.core.errors import FedsiloError, RunDirectoryError
from fedsilo.core.files.atomic_files import FULL, hold_name, write_atomically
from fedsilo.core.files.text_files import file_fault
from fedsilo.core.messages import RUN_NAME, RUN_NAME_WORDS
from fedsilo.core.one_line import as_word, one_line, quote_value
from fedsilo.core.settings.written_settings import group_settings
from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.core.versions import FEDSILO, git_revision, installed_version, processor
from fedsilo.server_app.config.settings import RUN_FORMAT, RunSettings
from fedsilo.server_app.records.forms import Content, check_table, read_content

if TYPE_CHECKING:  # PyTorch comes with it
    from fedsilo.strategies.meeting.participants import Participants

CONFIG, SUMMARY, SILOS = "config.toml", "summary.json", "silos.json"
CUT, STANDARDISATION, LOCK = "cut.json", "standardisation.json", ".lock"
ENDING = ".ending"  # exists while the documents that follow summary.json are written
MODEL, BEST = "model.safetensors", "best.safetensors"  # models of the last and the best round

# A larger text file is refused, because reading it could use up the memory
_MOST_BYTES = 2**30
_PACKAGES = ("flwr", "torch", "torchvision", "timm", "ray", "numpy", "scikit-learn", "grpcio")


@dataclass(frozen=True)
class RunDirectory:
    """The folder of one run, which may not exist yet."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def has_checkpoint(self) -> bool:
        """Return whether the folder of checkpoints has a file, so that the run can be resumed."""
        return any(self.checkpoints.glob("*"))

    def file(self, name: str) -> Path:
        """Return the path of a file in the directory, after checking that the file is safe to read.

        The file may be missing. ``name`` is trusted, and is not checked for "..".

        Raises:
            RunDirectoryError: the file is a pipe, a device or a folder, or is larger than 1 GiB. A
                link is refused if it leads out of the directory or to a missing file.
        """
        path = self.path / name
        refuse_outside(self.path, path)
        fault = file_fault(path, _MOST_BYTES)
        if fault or path.is_dir():
            raise RunDirectoryError(f"{path} {fault or 'is a folder'}: restore the run's own file")
        return path

    def write_json(self, name: str, content: Any) -> None:
        """Write ``content`` as JSON to the file ``name`` of the run, and replace an older file."""
        write_atomically(self.path / name, json.dumps(content, indent=2, sort_keys=False) + "\n")

    def read_json(self, name: str) -> Any:
        """Read a JSON file of the run, and check its content if ``FORMS`` has the file's name.

        ``FORMS`` has the types of the contents by file name, such as summary.json. Reading a
        missing key of the result raises a RunDirectoryError.

        Raises:
            RunDirectoryError: the file is missing, cannot be read, or does not have the type in
                ``FORMS``.
        """
        path = self.file(name)
        if not path.exists():
            raise RunDirectoryError(
                f"{path} is missing: the run has not ended, or this is not a run directory; resume "
                "the run, or name another directory"
            )
        try:
            return read_content(path.read_text(encoding="utf-8"), path)
        except (OSError, ValueError, RecursionError) as error:
            raise RunDirectoryError(
                f"{path} cannot be read ({one_line(error, 100)}): start a new run"
            ) from None

    def read_csv(self, name: str) -> list[dict[str, str]]:
        """Read a CSV file of the run, and return one mapping per row: column -> cell as a string.

        metrics.csv and traffic.csv must have their usual columns. Only the columns "steps" and
        "samples" of traffic.csv may be missing, because earlier versions of fedsilo did not write
        them. Cells must be printable, and must be numbers in columns such as "round". A "value"
        must be possible for its "metric".

        Raises:
            RunDirectoryError: the file is missing, cannot be read, lacks a column, or has an
                invalid cell.
        """
        path = self.file(name)
        try:
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                columns = reader.fieldnames or ()
                rows = []
                for cells in reader:
                    rows.append(Content(cells.items(), path))
        except (OSError, ValueError, csv.Error) as error:
            raise RunDirectoryError(
                f"{path} cannot be read ({one_line(error, 100)}): start a new run"
            ) from None
        check_table(path, columns, rows)
        return list[dict[str, str]](rows)

    def has_ended(self) -> bool:
        """Return whether the run is complete, except perhaps for its pictures."""
        return (self.path / SUMMARY).is_file() and not (self.path / ENDING).is_file()


def refuse_outside(run_dir: Path, path: Path) -> None:
    """Check that ``path`` is not a symbolic link that leads out of the run directory.

    With such a link, the sender of a directory could choose a file on the reader's machine that
    fedsilo reads or writes. Only ``path`` itself is checked, not the folders above it. A path that
    is not a link is accepted, even if it does not exist.

    Raises:
        RunDirectoryError: the path is a link to a place outside the directory, to a missing file,
            or to itself.
    """
    if not path.is_symlink():
        return
    # 'strict', because a link that leads nowhere today may lead somewhere when the file is written
    try:
        is_inside = path.resolve(strict=True).is_relative_to(run_dir.resolve())
    except (OSError, RuntimeError):
        is_inside = False
    if not is_inside:
        raise RunDirectoryError(
            f"{path} is a link out of the run directory: replace it by a copy of the file"
        )


def refuse_links(run_dir: Path) -> None:
    """Check that no folder of a run directory has a symbolic link that leads out of the directory.

    A directory from somebody else could have such links, to make fedsilo read or overwrite other
    files of the user. Links to folders are checked but not followed. A link to a missing file is
    refused too.

    Raises:
        RunDirectoryError: an entry is such a link. The error names one of them.
    """
    for folder, folders, files in os.walk(run_dir):
        for name in (*folders, *files):
            refuse_outside(run_dir, Path(folder, name))


def runs_folder(out: str) -> Path:
    """Return the folder of run directories: ``out``, $FEDSILO_RUNS or ~/.fedsilo/runs.

    The first of these that is not empty is used. A '~' at the start is expanded. The folder is not
    created.

    Raises:
        RunDirectoryError: the path is relative. A Flower app runs in another working folder, so a
            relative path would lead elsewhere.
    """
    folder = Path(out or os.environ.get("FEDSILO_RUNS", "") or "~/.fedsilo/runs").expanduser()
    if not folder.is_absolute():
        raise RunDirectoryError(
            f"setting 'run.out' must be an absolute path inside a Flower app, but is '{folder}'"
        )
    return folder


def with_run_name(settings: RunSettings) -> RunSettings:
    """Return the settings with a run name, which is generated if they have none.

    A generated name has the method, the data set, the seed, the UTC time and the process id, such
    as "fedavg-heart-seed0-20260102-030405-678". Each colon becomes "-", because names of plugin
    methods have a colon, which a run name must not have.
    """
    common = settings.common
    if common.run_name:
        return settings
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    # Names of plugins have a colon, which a run's name must not have
    prefix = f"{common.method}-{common.dataset}".replace(":", "-")
    name = f"{prefix}-seed{common.seed}-{stamp}-{os.getpid()}"
    return dataclasses.replace(settings, common=dataclasses.replace(common, run_name=name))


@contextmanager
def free_name(settings: RunSettings) -> Iterator[RunSettings]:
    """Yield the settings with a free run name, which is reserved while the ``with`` block runs.

    A name is taken if its run directory exists, or if another process has reserved it by a lock
    file (``hold_name``). The smallest free number from 2 is then appended, such as ``hearts-2``,
    and a line is printed. A directory counts as free if its run died before it wrote config.toml.

    The settings are yielded unchanged if the run is resumed, or if its name is empty or invalid.
    The start of the run refuses an invalid name later.
    """
    common = settings.common
    path = runs_folder(common.out) / common.run_name
    # An impossible name stays, and the run's start refuses it
    if common.resume or not RUN_NAME.fullmatch(common.run_name):
        yield settings
        return
    candidate, number = path, 1
    with ExitStack() as held:
        # Held before it is looked at: otherwise two processes could both find it free
        while not _is_free_for_us(candidate, held):
            number += 1
            candidate = path.with_name(f"{common.run_name}-{number}")
        if candidate != path:
            print(f"fedsilo: {_why_not_free(path)}; this run is named {candidate.name}")
        named = dataclasses.replace(common, run_name=candidate.name)
        yield dataclasses.replace(settings, common=named)


def _is_free_for_us(path: Path, held: ExitStack) -> bool:
    """Try to reserve directory ``path`` for a new run until ``held`` closes.

    Returns:
        True if the directory is reserved. False if another process holds its name or if it already
        exists. A directory of a run that died before its start counts as missing.
    """
    with ExitStack() as trial:
        is_free = trial.enter_context(hold_name(path)) and not _is_taken(path)
        if is_free:
            held.push(trial.pop_all())
        return is_free


def _why_not_free(path: Path) -> str:
    """Explain why a new run cannot use ``path``, as a clause for a printed line.

    If the path exists, the text says so. For an unfinished run, the text also names the command
    that continues the run. If the path is missing, the text says that another process is starting a
    run there. A directory of a run that died before its start counts as missing.
    """
    if not _is_taken(path):
        return f"another process is starting a run in {path}"
    hint = ""
    if (path / CONFIG).is_file() and not RunDirectory(path).has_ended():
        hint = f" and is unfinished (to continue: fedsilo resume {as_word(path)})"
    return f"{path} exists{hint}"


def open_run_directory(out: str, run_name: str, resume: bool) -> RunDirectory:
    """Check that a run can use its directory, and return the directory. Nothing is written.

    Args:
        out: the folder of run directories. If empty, $FEDSILO_RUNS or ~/.fedsilo/runs is used.
        run_name: the name of the directory in that folder.
        resume: whether the run continues in an existing directory.

    Raises:
        RunDirectoryError: in one of these cases:

            - The folder is a relative path, or the name is invalid.
            - The directory contains a link that leads out of it.
            - The run is resumed, but its directory does not exist.
            - The run is new, but its directory exists, even if it is empty. A directory of a run
              that died before its start is allowed.
    """
    path, fault = runs_folder(out) / run_name, ""
    # The name is checked first, because '../x' would lead to another folder
    if not RUN_NAME.fullmatch(run_name):
        fault = f"setting 'run.name' must be {RUN_NAME_WORDS}, but is {quote_value(run_name)}"
    elif not resume and _is_taken(path):
        fault = (
            f"run directory {path} exists: choose another 'run.name', set "
            "'run.resume' to true to continue it, or remove it"
        )
    elif resume and not path.is_dir():
        fault = f"there is no run directory {path} to resume: check 'run.out' and 'run.name'"
    if fault:
        raise RunDirectoryError(fault)
    refuse_links(path)
    return RunDirectory(path)


def _is_taken(path: Path) -> bool:
    """Return whether a path is in use, so that a new run must not write to it.

    A missing path is free. Any file is taken, and so is any folder without a lock file. A folder
    with a lock file is free if it has nothing else except silos.json, cut.json and half-written
    files. A run that died before it wrote config.toml leaves such a folder.
    """
    if not path.is_dir():
        return path.exists()
    names = {entry.name for entry in path.iterdir()}
    # Without a lock, no run has ever begun here, so the files are somebody's own
    if LOCK not in names:
        return True
    for name in names:
        half_written = name.startswith(".") and name.endswith(".part")
        if name not in (LOCK, SILOS, CUT) and not half_written:
            return True
    return False


def config_document(settings: RunSettings, launch: Mapping[str, Any]) -> str:
    """Build the text of config.toml, the record of how a run was started.

    The TOML text has these parts:

    - the number of the file's format,
    - all settings, including those with their default values,
    - the engine and the resources,
    - the environment: the processor and the versions of fedsilo, Python and packages.

    Args:
        settings: the run's settings.
        launch: the engine and resources, which ``fedsilo resume`` uses again. If it is empty, the
            text has no table "launch".
    """
    document: dict[str, Any] = {"format": RUN_FORMAT} | group_settings(settings.as_mapping())
    if launch:
        document["launch"] = dict(launch)
    document["environment"] = this_environment()
    return tomli_w.dumps(document)


def this_environment() -> dict[str, Any]:
    """Return the entry "environment" of config.toml: the processor and versions of software.

    The keys are "fedsilo-version", "fedsilo-revision" (a git revision), "python", "processor" and
    "packages" (name -> version). "packages" has those of ``_PACKAGES`` that are installed.
    """
    packages = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = installed_version(name)
    return {
        "fedsilo-version": FEDSILO,
        "fedsilo-revision": git_revision(),
        "python": platform.python_version(),
        "processor": processor(),
        "packages": packages,
    }


def silos_document(participants: Participants) -> dict[str, Any]:
    """Build the content of silos.json: site -> the facts that the site has stated.

    Each site has these keys:

    - "distribution": the group of sites with similar data that the site states,
    - "sizes": split -> number of samples,
    - "label_counts": split -> number of samples of each class (or other stratum of the task),
    - "fingerprints": split -> SHA-256 of its samples,
    - "dropped": the number of samples in no split,
    - "schema": the digest of a table's schema, or of images' classes and size,
    - "classes": the names of the classes,
    - "backbone": the digest of the weights that the network starts from.

    Three keys are optional:

    - "task": the task's name, if the task is not classification,
    - "software": versions by name, if the site sent any,
    - "agreed": the number of training samples that 'run.site-weights' gives this site.
    """
    agreed = participants.agreed_samples()
    document: dict[str, Any] = {}
    for site, facts in participants.facts.items():
        document[site] = {
            "distribution": facts.distribution,
            "sizes": facts.sizes,
            "label_counts": facts.label_counts,
            "fingerprints": facts.fingerprints,
            "dropped": facts.dropped,
            "schema": facts.schema,
            "classes": list(facts.class_names),
            "backbone": facts.backbone,
        }
        if facts.task != CLASSIFICATION:
            document[site]["task"] = facts.task
        if facts.software:
            document[site]["software"] = facts.software
        if site in agreed:
            document[site]["agreed"] = agreed[site]
    return document


@contextmanager
def only_writer(directory: RunDirectory, new: bool) -> Iterator[None]:
    """Create the run directory if it is missing, and lock it while the ``with`` block runs.

    No other process can lock the directory meanwhile. If the block raises a FedsiloError or the
    disk is full, the directory of a new run without a checkpoint is deleted. After any other
    exception the directory is kept, with the lock file.

    Args:
        directory: the run directory.
        new: True for a new run, or False for a resumed run.

    Raises:
        RunDirectoryError: in one of these cases:

            - Another process writes to the directory.
            - The run is new, but the directory already has a config.toml.
            - The disk is full while the block runs.
    """
    directory.path.mkdir(parents=True, exist_ok=True)
    # Following a link here would let the sender of a directory choose a file of ours to empty
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
        # Only after fedsilo's own errors: after a crash, somebody may want to look at the files
        try:
            with _explain_full_disk(directory):
                yield
        except FedsiloError:
            if new and not directory.has_checkpoint():
                shutil.rmtree(directory.path)
            raise


@contextmanager
def _explain_full_disk(directory: RunDirectory) -> Iterator[None]:
    """Turn the OSError of a full disk in the ``with`` block into an error that names the remedy.

    An exceeded disk quota is treated alike. The RunDirectoryError names the full file, and asks the
    user to make room. If the run has a checkpoint, the error gives the command to resume the run.
    Otherwise it asks the user to start the run again. All other errors pass through.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        again = "start the run again"
        if directory.has_checkpoint():
            again = f"run: fedsilo resume {as_word(directory.path)}"
        full = error.filename or directory.path
        raise RunDirectoryError(f"{full}: {error.strerror}: make room and {again}") from error
