"""Suppress small counts, and further counts that would reveal them by subtraction.

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
    """Return a table's counts, with None for each count that must not leave the site.

    Counts below the floor are suppressed, including 0. A single suppressed count could be computed
    from the total. So further counts are suppressed in a random order, until at least two are
    hidden and sum to at least 2 * floor. This may hide all counts. If the total is below the floor,
    all counts are suppressed.

    Args:
        counts: all cells of the table; a reader may know their total.
        floor: the smallest count that may leave; 1 or less suppresses nothing.
        secret: the hospital's secret seed, which decides the order in which further cells are
            suppressed.
        table: the parts of the table's name. Each name has its own order.
        in_a_row: whether the cells are neighbours, like the bins of a histogram. Outer cells, which
            hold few samples, then tend to be suppressed first.
    """
    if floor <= 1:
        return list(counts)
    if sum(counts) < floor:
        return [None] * len(counts)
    hidden = [place for place, count in enumerate(counts) if count < floor]
    # Further cells, until no hidden count follows from the total by subtraction
    if hidden:
        for place in _draw_order(len(counts), derive_seed(secret, "survey", *table), in_a_row):
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
    """Derive a seed for ``suppress`` from secret data: 56 bits of their SHA-256."""
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "big")


def _draw_order(cells: int, seed: int, in_a_row: bool) -> list[int]:
    """Draw a random order of the cell indices 0 to ``cells`` - 1.

    The same ``seed`` gives the same order, and every order is possible. If ``in_a_row``, the cells
    are neighbours, such as the bins of a histogram. A cell at distance d from the middle is then
    drawn with a probability proportional to 1 + d^3. Outer cells hold few samples, and tend to
    come first.
    """
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
    """Return a count that is not part of a table, or None if it is below the floor.

    A floor of 1 or less suppresses nothing, so even a count of 0 is returned. The cells of a table
    need ``suppress``, because a reader could compute a hidden cell from the total.
    """
    if floor > 1 and count < floor:
        return None
    return count
