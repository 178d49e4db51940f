"""Processes that this command starts: their tools, their ports, and how they are ended."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from threading import Thread

import psutil

from fedsilo.models.contract.errors import FedsiloError

RUN_MARK = "FLWR_HOME"  # each run has a folder of its own there; all its processes are told of it
_PARENT = "FEDSILO_ENDS_WITH"  # the process with which a command is to end
_PASSES = 5
_LOOK = 0.5  # seconds from one look for a parent to the next
_UNWINDING = 5.0  # seconds


class ProcessError(FedsiloError):
    """A process could not be started, or did not end well."""


def tool(name: str) -> str:
    """Return the path of a command that is installed beside this Python, else on the PATH.

    Raises:
        ProcessError: it is not installed.
    """
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.is_file() else shutil.which(name)
    if not path:
        raise ProcessError(
            f"'{name}' is not installed beside {sys.executable}: install fedsilo's "
            "dependencies, or use --engine inline"
        )
    return path


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def app_folder() -> Path:
    """Return the folder of pyproject.toml, which ``flwr run`` bundles.

    Raises:
        ProcessError: fedsilo is installed without its checkout.
    """
    folder = Path(__file__).resolve().parents[2]
    if not (folder / "pyproject.toml").is_file():
        raise ProcessError(
            f"{folder} has no pyproject.toml: Flower's engines need fedsilo's "
            "checkout (pip install -e .); or use --engine inline"
        )
    return folder


def end_trees(roots: Iterable[psutil.Process]) -> None:
    """End processes and all that they started: TERM, then KILL.

    Flower and Ray give their children sessions of their own, so a signal to the process group
    would miss a run that is still going on; the tree of parents does not.
    """
    members: dict[psutil.Process, None] = {}  # a set in order
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            members |= dict.fromkeys([root, *root.children(recursive=True)])
    tree = list(members)
    for patience, end in ((10.0, psutil.Process.terminate), (5.0, psutil.Process.kill)):
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                end(process)
        limit = time.monotonic() + patience
        while tree and time.monotonic() < limit:
            time.sleep(0.1)
            tree = [process for process in tree if runs(process)]


def end_run(home: Path) -> None:
    """End all processes of the run whose folder is ``home``, but for this one.

    Found by their environment: one whose parent has ended is in no tree. What was being started
    while others ended is found by another look.
    """
    for _ in range(_PASSES):
        marked = _processes_with(RUN_MARK, str(home))
        if not marked:
            return
        end_trees(marked)


def _processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Return this user's running processes that were started with ``variable`` set to ``value``."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or is another user's
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                found += [process] if runs(process) else []
    return found


def end_with(parent: int, by: signal.Signals = signal.SIGTERM) -> None:
    """See to it that this process ends soon after its parent, in whatever way that one ends.

    Args:
        parent: the id of the process that started this one.
        by: the signal that this one then sends to itself; where that is of no avail it ends hard.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK)
        os.kill(os.getpid(), by)
        time.sleep(_UNWINDING)
        os._exit(1)

    Thread(target=watch, name="end-with-parent", daemon=True).start()


def bound_environment() -> dict[str, str]:
    """Return the environment of a ``fedsilo`` command that is to end with this process."""
    return os.environ | {_PARENT: str(os.getpid())}


def end_if_bound() -> None:
    """See to it that this command ends with the process that bound it to itself, if one did."""
    parent = os.environ.pop(_PARENT, "")
    if parent.isdecimal():
        end_with(int(parent))


def runs(process: psutil.Process) -> bool:
    """Tell whether a process has not ended; one that nobody has collected yet has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def process_of(pid: int, started: float) -> psutil.Process | None:
    """Return a process that runs; None if it has ended. Ids are used again, starts are not."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < 1.0
        return process if same and runs(process) else None
    except psutil.NoSuchProcess:
        return None
