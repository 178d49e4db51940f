"""How long to wait from one look to the next: short after something came, longer when idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

SHORT, LONG = 0.05, 0.5  # seconds
_QUICK_FOR = 10.0  # seconds after something came


@dataclass
class Pace:
    """Waits of ``short`` seconds for some time after :meth:`quicken`, then of ``long``.

    Attributes:
        clock: tells seconds.
    """

    short: float = SHORT
    long: float = LONG
    clock: Callable[[], float] = time.monotonic
    _since: float = field(default=float("-inf"), init=False)

    def quicken(self) -> None:
        """Note that something came: more may."""
        self._since = self.clock()

    def next(self) -> float:
        """Return the seconds to wait now."""
        return self.short if self.clock() - self._since < _QUICK_FOR else self.long
