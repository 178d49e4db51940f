"""How often the hospital's processes look for something, and how they end with one another."""

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
_QUICK_FOR = 10.0  # seconds after something arrived
_UNWINDING = 5.0  # seconds after a signal


@dataclass
class PollInterval:
    """Seconds between two looks: ``short`` for some time after an arrival, ``long`` otherwise."""

    short: float = SHORT
    long: float = LONG
    clock: Callable[[], float] = time.monotonic
    _arrived: float = field(default=float("-inf"), init=False)

    def arrived(self) -> None:
        """Note that something arrived: more may follow."""
        self._arrived = self.clock()

    def seconds(self) -> float:
        """Return the seconds to wait now."""
        return self.short if self.clock() - self._arrived < _QUICK_FOR else self.long


def end_with(process_id: int, by: signal.Signals | None = None) -> None:
    """Make this process end soon after the process of that id, however that one ends.

    It first sends the signal ``by`` to itself, if one is named, and exits if that fails.
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
