"""Suppress small counts, and further counts from which small ones would follow by subtraction.

The rule for the counts of one table, whose total may be known, with floor f:

- Every count below f is suppressed, including a true zero.
- While only one count is suppressed, or the suppressed counts sum to less than 2 f, another one is
  suppressed as well, in an order that the hospital's own secret decides.
- If the total is below f, nothing leaves.

So a suppressed count could be any number below f, even for a reader who knows this rule, the total
and all other counts. Take any such number v for it, put the rest of the suppressed sum, which is
more than f, into one other suppressed cell, and zero into all others. Then v and the zeros are
suppressed as small, their sum is below 2 f, and if the secret's order names that other cell first,
the same counts leave. This would not hold if the smallest remaining count were always taken,
because its size would bound the others. Every order is possible. For neighbouring cells the outer
ones, which have few samples, come first more often.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from fedsilo.core.seeding import derive_seed


def suppress(
    counts: Sequence[int], floor: int, secret: int, *table: str, in_a_row: bool = False
) -> list[int | None]:
    """Return the counts of a table with None for those that stay at the site.

    Args:
        counts: all cells; their total may be known.
        floor: counts below it are suppressed; 1 suppresses none.
        secret: the hospital's own seed, which decides the further cells.
        table: names the table; each table has its own order.
        in_a_row: whether the cells are neighbours, like the bins of a histogram.
    """
    if floor <= 1:
        return list(counts)
    if sum(counts) < floor:
        return [None] * len(counts)
    hidden = [place for place, count in enumerate(counts) if count < floor]
    # Further cells, until no hidden count follows from the total by subtraction
    if hidden:
        for place in _order(len(counts), derive_seed(secret, "survey", *table), in_a_row):
            total = sum(counts[other] for other in hidden)
            if len(hidden) >= 2 and total >= 2 * floor:
                break
            if place not in hidden:
                hidden.append(place)
    cells: list[int | None] = list(counts)
    for place in hidden:
        cells[place] = None
    return cells


def secret_of(data: bytes) -> int:
    """Return a secret for ``suppress`` that is the same for the same data."""
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "big")


def _order(cells: int, seed: int, in_a_row: bool) -> list[int]:
    """Return a random order of the cells (any permutation), favouring outer cells if in a row."""
    places = np.arange(cells)
    from_middle = np.abs(places - (cells - 1) / 2)
    # Outer cells hold few samples, so suppressing them costs the reader least
    weights = np.ones(cells)
    if in_a_row:
        weights += from_middle**3
    drawn = np.random.default_rng(seed).choice(
        places, size=cells, replace=False, p=weights / weights.sum()
    )
    return [int(place) for place in drawn]


def at_least(count: int, floor: int) -> int | None:
    """Return a count that is released by itself; None if it is below the floor."""
    if floor > 1 and count < floor:
        return None
    return count
