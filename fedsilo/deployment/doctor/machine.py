"""Checks a machine: versions, folders, disk, memory, and whether ports are free."""

import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from fedsilo.core.versions import FEDSILO, TRIED_FLOWER, WORKER_FLOWER, git_revision
from fedsilo.deployment.doctor.findings import Passed, Refused
from fedsilo.deployment.worker.installed import installed_app, local_changes
from fedsilo.server_app.config.resources import free_memory

GIGABYTE = 10**9
_PROBE = 2**20  # number of bytes that are written to a folder to test it
_BRING = "copy the data there, or mount them read-only"


def utc_now() -> datetime:
    """Return the time of this machine's clock, in UTC."""
    return datetime.now(UTC)


def check_software() -> Passed:
    """Check the versions of Python and of fedsilo's dependencies, and describe the installation.

    The versions must meet the requirements in pyproject.toml. The result names fedsilo with its git
    revision, Python, Flower and PyTorch. Up to five files that git reports as changed are listed as
    a detail, because a hospital with changed files may refuse runs.

    Raises:
        Refused: a package is missing or has a version that fedsilo does not support.
        FedsiloError: the pyproject.toml of the installed fedsilo cannot be read.
    """
    app = installed_app()
    wrong = _wrong_versions(app.project["project"])
    if wrong:
        packages = " ".join(f"'{name}'" for name in wrong.values())
        raise Refused(
            f"this installation has {', '.join(wrong)}, but fedsilo needs other versions",
            f"pip install {packages}",
        )
    # A hospital with changed files refuses a run of the unchanged app
    changed = local_changes(app.folder)
    details = []
    if changed:
        details.append(f"files changed on this machine: {', '.join(changed[:5])}")
    return Passed(
        f"fedsilo {FEDSILO} (revision {git_revision()[:12]}), Python {platform.python_version()}, "
        f"flwr {version('flwr')} (supported: {WORKER_FLOWER}; for simulations up to "
        f"{TRIED_FLOWER}), "
        f"torch {version('torch')}",
        tuple(details),
    )


def _wrong_versions(project: Mapping[str, Any]) -> dict[str, str]:
    """List a project's requirements that the installed Python and packages do not meet.

    A pre-release of a package counts like a release.

    Args:
        project: the table [project] of pyproject.toml. Only its "requires-python" and
            "dependencies" are read, not its extras.

    Returns:
        A text such as "torch 2.0" or "no torch" -> the requirement to install instead. The
        mapping is empty if all requirements are met.
    """
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    wrong = {}
    if platform.python_version() not in SpecifierSet(project["requires-python"]):
        wrong[f"Python {platform.python_version()}"] = f"python{project['requires-python']}"
    for text in project["dependencies"]:
        wanted = Requirement(text)
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            wrong[f"no {wanted.name}"] = text
            continue
        # A build of PyTorch may be a pre-release, which specifiers exclude by default
        if not wanted.specifier.contains(found, prereleases=True):
            wrong[f"{wanted.name} {found}"] = text
    return wrong


def check_writable_folder(path: Path, what: str) -> Path:
    """Check by its mode that this user may write into a folder, and return its path.

    Nothing is written. ``what`` names the folder in errors, such as "the database's folder".

    Raises:
        Refused: the folder is missing, is not a folder, or is not writable.
    """
    fault, fix = "", ""
    if not path.is_dir():
        fault, fix = "is missing", "make the folder, or mount a volume there"
    elif not os.access(path, os.W_OK | os.X_OK):
        fault, fix = f"is not writable by user {os.getuid()}", "chown the folder, or the volume"
    if fault:
        raise Refused(f"{what} {path} {fault}", fix)
    return path


def check_data_folder(path: Path) -> Path:
    """Check that a folder of data is readable and not empty, and return ``path`` unchanged.

    The folder's files are not read.

    Raises:
        Refused: the path is missing or not a folder, or the folder is empty or not readable by this
            user.
    """
    fault, fix = "", _BRING
    try:
        if not path.is_dir():
            fault = "is missing"
        # Docker makes an empty folder if the one to mount does not exist on the host
        elif next(path.iterdir(), None) is None:
            fault = "is empty"
    except PermissionError:
        fault, fix = f"is not readable by user {os.getuid()}", "let that user read it"
    if fault:
        raise Refused(f"data directory {path} {fault}", fix)
    return path


def has_site_file(path: Path) -> bool:
    """Return whether a hospital's site file exists at ``path``.

    A character device, such as /dev/null, counts as a missing file, because Docker Compose mounts
    that device if the host has no site file.

    Raises:
        Refused: the path is a folder or another special file, or this user cannot read the file.
            These are errors, because without the file the hospital's rules would be ignored.
    """
    if not path.exists() or path.is_char_device():
        return False
    fault, fix = "", ""
    if not path.is_file():  # Docker creates a folder if the path is missing on the host
        fault, fix = "is not a file", "let SITE_FILE_n name a file that exists on the host"
    elif not os.access(path, os.R_OK):
        fault, fix = f"is not readable by user {os.getuid()}", "chown or chmod it"
    if fault:
        raise Refused(f"site file {path} {fault}", fix)
    return True


def check_disk_space(folders: Iterable[Path], least: float) -> str:
    """Check that each folder's disk has free space and can be written, and describe the free space.

    The free space must be at least ``least`` gigabytes (10^9 bytes). Then a test file of 1 MiB is
    written into the folder and removed again. Only a written file reveals a quota or a failing
    disk.

    Returns:
        The text "FOLDER: N GB free" for each folder, joined by commas. It is empty without folders.

    Raises:
        Refused: a folder has less than ``least`` gigabytes free, or no file can be written there.
            Later folders are then not checked.
        OSError: a folder does not exist.
    """
    said = []
    for folder in folders:
        fault, fix = "", ""
        free = shutil.disk_usage(folder).free / GIGABYTE
        if free < least:
            fault = f"{folder} has {free:.2f} GB free, but a run needs at least {least:g} GB"
            fix = "free some space, or name a folder on another disk"
        else:
            # A quota or a failing disk shows only when something is really written
            try:
                with tempfile.TemporaryFile(dir=folder) as probe:
                    probe.write(b"\0" * _PROBE)
                    os.fsync(probe.fileno())
            except OSError as error:
                fault = f"cannot write a file into {folder} ({error.strerror})"
                fix = "fix the disk, or let this user write there"
        if fault:
            raise Refused(fault, fix)
        said.append(f"{folder}: {free:.0f} GB free")
    return ", ".join(said)


def find_existing_folder(folder: Path) -> Path:
    """Return the folder if it exists, and otherwise the nearest folder above it that exists."""
    while not folder.is_dir():
        folder = folder.absolute().parent
    return folder


def check_memory(least: float, most: float = 0.0) -> str:
    """Check that there is enough memory to answer a message, and describe the free memory.

    A gigabyte is 10^9 bytes. Inside a container, only memory below the container's limit counts as
    free.

    Args:
        least: gigabytes that a message needs.
        most: gigabytes that the hospital allows for a message, or 0 for no limit.

    Returns:
        A text such as "12.3 GB free".

    Raises:
        Refused: the free memory is below ``least``, or ``most`` is set and below ``least``.
    """
    free = free_memory() / GIGABYTE
    fault, fix = "", ""
    if most and most < least:
        fault = f"'max-memory' allows a message {most:g} GB, but PyTorch itself needs {least:g} GB"
        fix = "raise it in the site file or the node config"
    elif free < least:
        fault = f"{free:.1f} GB of memory are free, but a message needs at least {least:g} GB"
        fix = "end other programs, or raise the container's limit"
    if fault:
        raise Refused(fault, fix)
    return f"{free:.1f} GB free"


def check_port(host: str, port: int, what: str, own: str) -> str:
    """Check that a port is free for a program, or that the program itself already uses the port.

    The port is free if it can be bound. A port in use is accepted only if the process that listens
    on it, or an ancestor of that process, was started with the argument ``own``.

    Args:
        host: the address to listen on.
        port: the TCP port.
        what: the name of the program, for the result and the error.
        own: an argument that identifies the program, such as the path of its key. If it is empty, a
            port in use is always refused.

    Returns:
        A sentence that says which of the two cases applies.

    Raises:
        Refused: another program listens on the port, or the address cannot be used.
    """
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    # Binding is the only certain test. SO_REUSEADDR, as servers use it, so that the port of a
    # program that has just ended counts as free
    try:
        with socket.socket(family) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((host, port))
        return f"{host}:{port} is free for {what}"
    except OSError as error:
        process = _find_listener(port)
        user = "not available"
        if process:
            if _was_started_with(process, own):
                return (
                    f"{host}:{port} is in use by {what}, which already runs (process {process.pid})"
                )
            user = f"taken by process {process.pid} ({process.name()})"
        raise Refused(
            f"{host}:{port} is needed for {what}, but is {user} ({error.strerror})",
            "end the program that listens there, or choose another port",
        ) from error


def runs_on(port: int, own: str) -> bool:
    """Return whether the process that listens on a port was started with the argument ``own``.

    An ancestor of the process may have the argument instead. The result is False if no process
    listens there, if the system hides it from this user, or if ``own`` is empty.
    """
    process = _find_listener(port)
    return bool(process and _was_started_with(process, own))


def _find_listener(port: int) -> psutil.Process | None:
    """Find the process that listens on a TCP port of this machine, at any of its addresses.

    The result is None if no process listens there, or if the system hides it from this user.
    """
    with suppress(psutil.Error):
        for found in psutil.net_connections(kind="tcp"):
            listens = found.status == psutil.CONN_LISTEN
            if listens and getattr(found.laddr, "port", None) == port and found.pid:
                return psutil.Process(found.pid)
    return None


def _was_started_with(process: psutil.Process, word: str) -> bool:
    """Return whether the command line of a process, or of one of its ancestors, has an argument.

    The whole argument must equal ``word``. Processes whose command line cannot be read are skipped.
    If ``word`` is empty, the result is False.
    """
    if not word:
        return False
    for one in (process, *process.parents()):
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            if word in one.cmdline():
                return True
    return False
