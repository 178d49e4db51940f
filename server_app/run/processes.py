"""Processes that this command starts: their tools, their ports, and how they are ended."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from models.contract.errors import FedsiloError


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
    tree: list[psutil.Process] = []
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            tree += [root, *root.children(recursive=True)]
    for patience, end in ((10.0, psutil.Process.terminate), (5.0, psutil.Process.kill)):
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                end(process)
        limit = time.monotonic() + patience
        while tree and time.monotonic() < limit:
            time.sleep(0.1)
            tree = [process for process in tree if runs(process)]


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
