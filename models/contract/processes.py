"""Ends a process together with the one that it belongs to."""

import os
import signal
import sys
import time
from contextlib import suppress
from threading import Thread

import psutil

_EVERY = 0.5  # seconds between two looks at the process
_UNWINDING = 5.0  # seconds that a process has after a signal


def end_with(process_id: int, by: signal.Signals | None = None) -> None:
    """End this process soon after the process with the given id, however that one ends.

    Args:
        process_id: the process to watch.
        by: a signal that this process first sends to itself; it exits if that fails. None: it exits
            at once.
    """
    try:
        process = psutil.Process(process_id)
    except psutil.NoSuchProcess:
        os._exit(1)

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(_EVERY)
        if by:
            os.kill(os.getpid(), by)
            time.sleep(_UNWINDING)
        sys.stderr.flush()
        os._exit(1)

    Thread(target=watch, name=f"end-with-{process_id}", daemon=True).start()
