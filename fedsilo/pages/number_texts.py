"""Numbers as people read them."""

import math
from collections.abc import Sequence
from itertools import pairwise

from fedsilo.models.measures.intervals import Estimate

NONE = "n/a"
BINARY = ("0 (no)", "1 (yes)")  # the groups of a number whose only edge is 0.5


def share(value: float | None) -> str:
    """Return a value from 0 to 1, or another of that size, with three decimals."""
    return NONE if value is None else f"{value:.3f}"


def percent(value: float) -> str:
    """Return a share in percent: ``81.2 %``."""
    return f"{100 * value:.1f} %"


def with_interval(found: Estimate | None) -> str:
    """Return a value with its interval: ``0.812 (0.730 to 0.873)``."""
    if found is None or found.interval is None:
        return share(found.value if found else None)
    return f"{found.value:.3f} ({found.interval.low:.3f} to {found.interval.high:.3f})"


def at_most(bound: float) -> str:
    """Return a bound such as epsilon with two decimals, never below itself."""
    return f"{math.ceil(100 * bound) / 100:,.2f}"


def hide_small_count(count: int | None, floor: int) -> str:
    """Return a count of patients, or that it is below the floor."""
    return f"< {floor}" if count is None else f"{count:,}"


def edge_names(edges: Sequence[float]) -> list[str]:
    """Return the names of the groups that edges cut: below 1, 1 to 2, from 2."""
    if list(edges) == [0.5]:
        return [*BINARY]
    shown = [f"{edge:g}" for edge in edges]
    between = [f"{low} to {high}" for low, high in pairwise(shown)]
    return [f"below {shown[0]}", *between, f"from {shown[-1]}"]
