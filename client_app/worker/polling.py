"""The intervals at which a hospital's processes poll, and how they end together."""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread

import psutil

SHORT, LONG = 0.05, 0.5  # seconds
_QUICK_FOR = 10.0  # seconds of short intervals after an arrival
_UNWINDING = 5.0  # seconds that a process has after a signal


@dataclass
class PollInterval:
    """Seconds between two polls: ``short`` for some time after an arrival, else ``long``."""

    short: float = SHORT
    long: float = LONG
    clock: Callable[[], float] = time.monotonic
    _arrived: float = field(default=float("-inf"), init=False)

    def note_arrival(self) -> None:
        """Record an arrival, because more may follow soon."""
        self._arrived = self.clock()

    def seconds(self) -> float:
        """Return the seconds to wait before the next poll."""
        return self.short if self.clock() - self._arrived < _QUICK_FOR else self.long


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
                time.sleep(LONG)
        if by:
            os.kill(os.getpid(), by)
            time.sleep(_UNWINDING)
        sys.stderr.flush()
        os._exit(1)

    Thread(target=watch, name=f"end-with-{process_id}", daemon=True).start()
