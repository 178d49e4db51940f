"""What a machine must have: versions, disk, memory, ports that nobody else listens on."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from fedsilo.client_app.worker.installed import InstalledApp, installed_app, local_changes
from fedsilo.models.contract.versions import FEDSILO, git_revision
from fedsilo.server_app.doctor.findings import Passed, Refused

GIGABYTE = 10**9
_SHOWN = ("flwr", "torch")
_CGROUP = Path("/sys/fs/cgroup")
_PROBE = 2**20  # bytes


def software() -> Passed:
    """Say what is installed, and hold it against what the installed fedsilo asks for.

    Raises:
        Refused: Python or a package is missing, or of another version; names all of them.
    """
    app = installed_app()
    if wrong := _wrong_versions(app):
        names = " ".join(f"'{name}'" for name in wrong.values())
        raise Refused(f"installed are {', '.join(wrong)}", f"pip install {names}")
    said = ", ".join(f"{name} {version(name)}" for name in _SHOWN)
    changed = local_changes(app.folder)
    details = [f"changed here: {', '.join(changed[:5])}"] if changed else []
    return Passed(
        f"fedsilo {FEDSILO} (revision {git_revision()[:12]}), Python {platform.python_version()}, "
        f"{said}",
        tuple(details),
    )


def _wrong_versions(app: InstalledApp) -> dict[str, str]:
    """Return what is not as pyproject.toml asks: what there is, and what to install instead."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    project, wrong = app.project["project"], {}
    if platform.python_version() not in SpecifierSet(project["requires-python"]):
        wrong[f"Python {platform.python_version()}"] = f"python{project['requires-python']}"
    for text in project["dependencies"]:
        wanted = Requirement(text)
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            wrong[f"no {wanted.name}"] = text
            continue
        if not wanted.specifier.contains(found, prereleases=True):
            wrong[f"{wanted.name} {found}"] = text
    return wrong


def room(folders: Iterable[Path], least: float) -> str:
    """Say how much is free where folders lie, each of which must take a file.

    Args:
        folders: that are there.
        least: gigabytes that must be free.

    Raises:
        Refused: it is less, or nothing can be written.
    """
    free = {}
    for folder in folders:
        free[folder] = shutil.disk_usage(folder).free / GIGABYTE
        if free[folder] < least:
            raise Refused(
                f"{folder} has {free[folder]:.2f} GB free, and a run needs {least:g} at least",
                "make room, or name a folder of another disk",
            )
        _write_probe(folder)
    return ", ".join(f"{folder}: {gigabytes:.0f} GB free" for folder, gigabytes in free.items())


def nearest(folder: Path) -> Path:
    """Return a folder, or the one that is there in which it will be made."""
    return next(one for one in (folder, *folder.absolute().parents) if one.is_dir())


def _write_probe(folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0" * _PROBE)
            os.fsync(probe.fileno())
    except OSError as error:
        fault = f"{folder} takes no file ({error.strerror})"
        raise Refused(fault, "mend the disk, or let this user write there") from error


def memory(least: float, most: float = 0.0) -> str:
    """Say how much memory is free, by the container's bound too.

    Args:
        least: gigabytes that one message needs at least.
        most: gigabytes that the hospital gives a message; 0: nine tenths of the machine's.

    Raises:
        Refused: it is less than ``least``.
    """
    free = min(psutil.virtual_memory().available, *_left_in_container()) / GIGABYTE
    if most and most < least:
        raise Refused(
            f"'max-memory' gives a message {most:g} GB, and PyTorch alone takes {least:g}",
            "raise it in the site file or the node config",
        )
    if free < least:
        fault = f"{free:.1f} GB of memory are free, and a message takes {least:g} at least"
        raise Refused(fault, "end what else runs here, or raise the container's bound")
    return f"{free:.1f} GB free"


def _left_in_container() -> list[float]:
    """Return the bytes that the container may still take; infinite where nothing bounds it."""
    left = [float("inf")]
    with suppress(OSError, ValueError, KeyError):  # "max" is no number: there is no bound
        most, used, stat = (
            (_CGROUP / f"memory.{name}").read_text() for name in ("max", "current", "stat")
        )
        cached = dict(line.split() for line in stat.splitlines())["inactive_file"]
        left.append(int(most) - int(used) + int(cached))  # what is only cached makes room
    return left


def own_port(host: str, port: int, what: str, own: str) -> str:
    """Say that a port is free, or that what is to listen there does so already.

    Args:
        host: the address to listen on.
        port: its number.
        what: what listens there, for people.
        own: a word of that program's command by which it is known, such as the path of its key.

    Raises:
        Refused: somebody else listens there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((host, port))
        return f"{host}:{port} is free for {what}"
    except OSError as error:
        process = _listener(port)
        if process and _is_of(process, own):
            return f"{host}:{port} is {what}'s, which runs already (process {process.pid})"
        taken = f"taken by process {process.pid} ({process.name()})" if process else "not to be had"
        raise Refused(
            f"{host}:{port}, meant for {what}, is {taken} ({error.strerror})",
            "end what listens there, or choose another port",
        ) from error


def runs_on(port: int, own: str) -> bool:
    """Tell whether a process whose command has the word ``own`` listens on a port."""
    process = _listener(port)
    return bool(process and _is_of(process, own))


def _listener(port: int) -> psutil.Process | None:
    """Return the process that listens on a port, None if there is none or it is hidden."""
    with suppress(psutil.Error):
        for found in psutil.net_connections(kind="tcp"):
            listens = found.status == psutil.CONN_LISTEN
            if listens and getattr(found.laddr, "port", None) == port and found.pid:
                return psutil.Process(found.pid)
    return None


def _is_of(process: psutil.Process, word: str) -> bool:
    """Tell whether ``word`` is one of the command of a process, or of one that started it."""
    if not word:
        return False
    for one in (process, *process.parents()):
        with suppress(psutil.Error):
            if word in one.cmdline():
                return True
    return False
