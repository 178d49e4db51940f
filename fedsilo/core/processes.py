"""Starts and ends the processes of a run: paths of commands, free ports, process trees."""

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread
from types import ModuleType

import psutil

from fedsilo.core.errors import ProcessError
from fedsilo.core.files.locations import installed_folder

VERBOSE = "FEDSILO_VERBOSE"  # set by --verbose: show what Flower and Ray print
LAUNCH = "FEDSILO_LAUNCH"  # engine and resources as JSON, for the app in a Flower run
RUN_MARK = "FLWR_HOME"  # each run has its own folder, so this variable marks all its processes
_PASSES = 5
_EVERY = 0.5  # seconds between two looks at the process
_UNWINDING = 5.0  # seconds that a process has after a signal


def tool(name: str) -> str:
    """Return the path of a command, such as ``flwr``.

    The command is searched for in the folder of the running Python interpreter first, and then on
    the PATH.

    Raises:
        ProcessError: the command is in neither place.
    """
    own = Path(sys.executable).parent / name
    path = str(own) if own.is_file() else shutil.which(name)
    if not path:
        raise ProcessError(
            f"'{name}' is not installed with {sys.executable}: install fedsilo's "
            "dependencies, or use --engine inline"
        )
    return path


def free_ports(count: int) -> list[int]:
    """Return ``count`` different TCP ports of the loopback interface that are free now.

    The ports are not reserved, so another process may take one at any time.
    """
    # All ports are held at once, because one port could otherwise come twice
    with ExitStack() as stack:
        free = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        return [int(stack.enter_context(one).getsockname()[1]) for one in free]


def app_folder() -> Path:
    """Return fedsilo's checkout, the folder whose files ``flwr run`` sends to the sites.

    Raises:
        ProcessError: fedsilo's folder has no pyproject.toml, so it is not a checkout.
    """
    folder = installed_folder()
    if not (folder / "pyproject.toml").is_file():
        raise ProcessError(
            f"{folder} has no pyproject.toml: Flower's engines need fedsilo's "
            "checkout (pip install -e .); or use --engine inline"
        )
    return folder


def end_trees(roots: Iterable[psutil.Process]) -> None:
    """End processes and all their descendants, by SIGTERM and, if that fails, by SIGKILL.

    SIGKILL follows 10 seconds after SIGTERM. The function returns when all processes have ended, or
    5 seconds after SIGKILL. It does not report whether they have ended. Descendants in other
    process groups and sessions are ended too.

    Raises:
        psutil.AccessDenied: a process belongs to another user.
    """
    # All are listed before the first signal: once a parent has ended, its children are not found.
    # A mapping serves as a set that keeps its order. A signal to the process group would not do,
    # because Flower and Ray start their children in new sessions
    members: dict[psutil.Process, None] = {}
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
    """End all processes of a run except the calling process.

    A process belongs to the run if its environment variable FLWR_HOME is ``home``, the run's
    folder. Its descendants are ended too, and its parent need not exist any more. Up to five passes
    find processes that start during an earlier pass. Processes of other users are skipped, because
    their environment is hidden.
    """
    for _ in range(_PASSES):
        marked = []
        for process in psutil.process_iter():
            # The process may have ended, or belong to another user
            with suppress(psutil.Error, OSError):
                marks = process.environ().get(RUN_MARK) == str(home)
                if marks and process.pid != os.getpid() and runs(process):
                    marked.append(process)
        if not marked:
            return
        end_trees(marked)


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the caller's script (``__main__``) from processes that start inside the ``with`` block.

    A new process of Python's multiprocessing would import the script, which could start the run
    again.
    """
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def runs(process: psutil.Process) -> bool:
    """Return whether a process is running. A zombie does not count as running."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def process_of(pid: int, started: float) -> psutil.Process | None:
    """Return the running process with the id ``pid`` and this start time; None if it has ended.

    The start time is needed because the system may have given the id to a later process.
    ``started`` is in seconds since 1970, and may be wrong by less than one second. A zombie counts
    as ended.
    """
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < 1.0
        return process if same and runs(process) else None
    except psutil.NoSuchProcess:
        return None


def end_with(process_id: int, by: signal.Signals | None = None) -> None:
    """Make this process exit with status 1 soon after another process has ended for any reason.

    A daemon thread checks the other process twice a second. If the other process does not exist at
    the time of the call, this process exits at once and without the signal ``by``.

    Args:
        process_id: the id of the process to watch.
        by: a signal that this process first sends to itself, so that it can end in order. It exits
            5 seconds later in any case. If None, it exits without a signal.
    """
    try:
        process = psutil.Process(process_id)
    except psutil.NoSuchProcess:
        os._exit(1)

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(_EVERY)
        # A server ends its own children on SIGTERM, which a hard exit would leave running
        if by:
            os.kill(os.getpid(), by)
            time.sleep(_UNWINDING)
        sys.stderr.flush()
        os._exit(1)

    Thread(target=watch, name=f"end-with-{process_id}", daemon=True).start()
