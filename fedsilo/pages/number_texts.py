"""Numbers as people read them."""

import math
from collections.abc import Sequence
from itertools import pairwise

from fedsilo.models.measures.intervals import Estimate

NONE = "n/a"
BINARY = ("0 (no)", "1 (yes)")  # the groups of a number whose only edge is 0.5


def share(value: float | None) -> str:
    """Return a value, such as a share from 0 to 1, with three decimals; "n/a" for None."""
    if value is None:
        return NONE
    return f"{value:.3f}"


def percent(value: float) -> str:
    """Return a share in percent: ``81.2 %``."""
    return f"{100 * value:.1f} %"


def with_interval(found: Estimate | None) -> str:
    """Return a value with its interval: ``0.812 (0.730 to 0.873)``."""
    if found is None:
        return NONE
    value = share(found.value)
    if found.interval is None:
        return value
    return f"{value} ({share(found.interval.low)} to {share(found.interval.high)})"


def at_most(bound: float) -> str:
    """Return a bound such as epsilon with two decimals, rounded up so that it stays a bound."""
    return f"{math.ceil(100 * bound) / 100:,.2f}"


def hide_small_count(count: int | None, floor: int) -> str:
    """Return a count of patients as text; None is a hidden count, which is below the floor."""
    if count is None:
        return f"< {floor}"
    return f"{count:,}"


def edge_names(edges: Sequence[float]) -> list[str]:
    """Return the names of the groups between edges: "below 1", "1 to 2", "from 2"."""
    if list(edges) == [0.5]:
        return list(BINARY)
    shown = [f"{edge:g}" for edge in edges]
    between = [f"{low} to {high}" for low, high in pairwise(shown)]
    return [f"below {shown[0]}", *between, f"from {shown[-1]}"]
