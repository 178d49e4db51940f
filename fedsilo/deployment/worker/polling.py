"""The intervals at which a hospital's processes poll."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

SHORT, LONG = 0.05, 0.5  # seconds
_QUICK_FOR = 10.0  # seconds of short intervals after an arrival


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
        if self.clock() - self._arrived < _QUICK_FOR:
            return self.short
        return self.long
