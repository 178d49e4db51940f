"""Counts that may leave: small ones are suppressed, and what would give them away by subtraction.

The rule, for the counts of one table whose total may be known, with the floor f:

- every count below f is suppressed, a true zero too;
- as long as only one is suppressed, or all suppressed ones together are below 2 f, another one is
  suppressed as well, in an order that the hospital's own secret decides;
- of a total below f nothing leaves.

So whatever is suppressed could be each number below f, also for who knows this rule, the total and
all other counts: put that number v in its place, all the rest of the suppressed sum, more than f,
in one other suppressed place and nothing in the others. Then v and the nothings are suppressed for
being small, their sum is below 2 f, and if the secret's order names that other place first, the
very same counts leave. It would not hold if the smallest count were taken: then its size would
bound the others. Every order is possible; of cells in a row the outer ones, where few
samples are, come first more often.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from fedsilo.models.contract.seeding import derive_seed


def suppressed(
    counts: Sequence[int], floor: int, secret: int, *table: str, in_a_row: bool = False
) -> list[int | None]:
    """Return the counts of a table with None for those that stay at the site.

    Args:
        counts: all cells, whose total may be known.
        floor: counts below it are suppressed; 1: none.
        secret: the hospital's own, which decides what else is.
        table: names the table: each has an order of its own.
        in_a_row: whether the cells are neighbours, as those between edges are.
    """
    if floor <= 1:
        return list(counts)
    if sum(counts) < floor:
        return [None] * len(counts)
    hidden = {place for place, count in enumerate(counts) if count < floor}
    order = _order(len(counts), derive_seed(secret, "survey", *table), in_a_row)
    further = [place for place in order if place not in hidden]
    while hidden and further and _gives_away([counts[place] for place in hidden], floor):
        hidden.add(further.pop(0))
    return [None if place in hidden else count for place, count in enumerate(counts)]


def secret_of(data: bytes) -> int:
    """Return a secret of ``suppressed`` that is the same for the same data."""
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "big")


def _order(cells: int, seed: int, in_a_row: bool) -> list[int]:
    """Return the cells in an order drawn from the seed, each possible; outer ones sooner."""
    places = np.arange(cells)
    from_middle = np.abs(places - (cells - 1) / 2)
    weights = 1 + from_middle**3 if in_a_row else np.ones(cells)
    drawn = np.random.default_rng(seed).choice(
        places, size=cells, replace=False, p=weights / weights.sum()
    )
    return [int(place) for place in drawn]


def _gives_away(counts: Sequence[int], floor: int) -> bool:
    return len(counts) < 2 or sum(counts) < 2 * floor


def at_least(count: int, floor: int) -> int | None:
    """Return a count that is released alone, None if it is below the floor."""
    return count if count >= floor or floor <= 1 else None
