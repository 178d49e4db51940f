"""Suppressed counts: by hand, and against who knows the rule, the total and all other counts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.client_app.summary.suppression import at_least, suppress

Told = tuple[int | None, ...]


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ([30, 40, 50], [30, 40, 50]),
        ([3, 4], [None, None]),  # the total is below the floor
        ([30, 0], [None, None]),  # else the zero would be 30 less 30
        ([8, 9, 9, 40], [None, None, None, 40]),  # 26 together
    ],
)
def test_by_hand(counts: list[int], told: list[int | None]) -> None:
    assert suppress(counts, 10, 7, "t") == told


def test_a_floor_of_one_suppresses_nothing() -> None:
    assert suppress([0, 1, 5], 1, 7, "t") == [0, 1, 5]
    assert (at_least(0, 1), at_least(9, 10), at_least(10, 10)) == (0, None, 10)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(2, 12), st.integers(0, 99))
def test_what_leaves_is_true_large_and_gives_nothing_away(
    counts: list[int], floor: int, secret: int
) -> None:
    told = suppress(counts, floor, secret, "t")
    hidden = [count for count, shown in zip(counts, told, strict=True) if shown is None]
    for count, shown in zip(counts, told, strict=True):
        assert shown is None or (shown == count and count >= floor)
    if hidden and len(hidden) < len(counts):
        assert len(hidden) >= 2
        assert sum(hidden) >= 2 * floor, "the rest is no small count of a few cells"


def _worlds(cells: int, total: int) -> list[tuple[int, ...]]:
    """Return all tables of so many cells and that total."""
    return [
        (*some, total - sum(some))
        for some in itertools.product(range(total + 1), repeat=cells - 1)
        if sum(some) <= total
    ]


def _possible(
    floor: int, cells: int, total: int, orders: int, in_a_row: bool
) -> dict[Told, list[set[int]]]:
    """Return by what leaves which counts each cell may have, over all tables and secrets."""
    found: dict[Told, list[set[int]]] = {}
    for world in _worlds(cells, total):
        for secret in range(orders):
            told = tuple(suppress(world, floor, secret, "t", in_a_row=in_a_row))
            seen = found.setdefault(told, [set() for _ in range(cells)])
            for place, count in enumerate(world):
                seen[place].add(count)
    return found


@pytest.mark.parametrize("in_a_row", [False, True])
@pytest.mark.parametrize(("cells", "total"), [(2, 5), (2, 9), (3, 9), (3, 14), (4, 11)])
def test_who_knows_the_rule_learns_nothing_below_the_floor(
    cells: int, total: int, in_a_row: bool
) -> None:
    """Over all tables of a total: each suppressed count may be each number below the floor."""
    floor = 3
    for told, seen in _possible(floor, cells, total, 60, in_a_row).items():
        for place, shown in enumerate(told):
            if shown is None:
                assert set(range(floor)) <= seen[place], (told, place)


def test_the_smallest_count_instead_would_rule_counts_out() -> None:
    """Why the order is secret: taken by size, of 0, 1 and 2 only 2 would be left."""

    def smallest_first(counts: tuple[int, ...]) -> Told:
        hidden = {place for place, count in enumerate(counts) if count < 3}
        rest = sorted(set(range(len(counts))) - hidden, key=lambda place: counts[place])
        while hidden and rest and (len(hidden) < 2 or sum(counts[p] for p in hidden) < 3):
            hidden.add(rest.pop(0))
        return tuple(None if p in hidden else count for p, count in enumerate(counts))

    worlds = [w for w in _worlds(3, 8) if smallest_first(w) == smallest_first((2, 3, 3))]
    assert {world[0] for world in worlds} == {2, 3}
