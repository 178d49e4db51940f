"""Columns in another unit are found, and columns that differ only by their patients are not."""

import math

import numpy as np
import pytest
import torch

from fedsilo.core.site_facts import FeatureStatistics, Sums
from fedsilo.models.maths.standardisation import sums_of
from fedsilo.models.maths.unlike_columns import UnlikeColumn, compare_sites, compare_with

CHOL = "cholesterol in mg/dl against mmol/l"


def _sums(*columns: list[float]) -> Sums:
    return sums_of(torch.tensor(columns, dtype=torch.float64).T)


def _spread(mean: float, std: float) -> list[float]:
    """Return two values with this mean and standard deviation."""
    return [mean - std, mean + std]


def _compared(**columns: list[float]) -> list[UnlikeColumn]:
    return compare_sites(("chol",), {site: _sums(values) for site, values in columns.items()}, 2)


def test_of_three_sites_the_one_in_mmol_is_named_with_both_means() -> None:
    # Means 200, 240 and 5. Of the two others 200 is nearer to 5, and 200 / 5 = 40 is about 38.67
    found = _compared(north=[150.0, 250.0], south=[200.0, 280.0], west=[4.0, 6.0])
    assert found == [UnlikeColumn("chol", "west", 5.0, 200.0, CHOL)]
    said = found[0].sentence("at the other sites")
    assert "mean 5 at site west, 200 at the other sites" in said
    assert CHOL in said
    # The other direction: two sites in mmol/l and one in mg/dl
    found = _compared(north=[4.0, 6.0], south=[5.0, 7.0], west=[150.0, 250.0])
    assert [(one.site, one.mean, one.others) for one in found] == [("west", 200.0, 6.0)]


def test_of_two_sites_the_pair_is_named_once() -> None:
    found = _compared(south=[150.0, 250.0], north=[4.0, 6.0])
    assert [(one.site, one.mean, one.others) for one in found] == [("north", 5.0, 200.0)]
    assert _compared(alone=[1.0, 2.0]) == []


def test_a_column_that_one_site_did_not_measure_is_found() -> None:
    found = _compared(a=[200.0, 240.0], b=[190.0, 260.0], c=[0.0, 0.0])
    assert found == [UnlikeColumn("chol", "c", 0.0, 220.0)]


@pytest.mark.parametrize(
    ("one", "others", "is_unlike"),
    [
        ((98.6, 1.3), (37.0, 0.7), True),  # Fahrenheit: 37 * 1.8 + 32 = 98.6
        ((80.0, 15.0), (176.0, 33.0), False),  # pounds, but within three deviations
        ((170.0, 8.0), (66.9, 3.2), True),  # cm against inches
        ((60.0, 10.0), (35.0, 10.0), False),  # older patients
        ((0.6, 1.0), (0.1, 1.0), False),  # a mean near 0 has a large ratio to anything
        ((5.0, 8.0), (50.0, 80.0), True),  # a tenth: the deviation too
        ((4.0, 10.0), (22.0, 20.0), False),  # more than five times, but one deviation apart
        ((-3.0, 1.0), (3.0, 1.0), False),
    ],
)
def test_means_differ_by_five_or_as_a_change_of_unit_explains(
    one: tuple[float, float], others: tuple[float, float], is_unlike: bool
) -> None:
    for first, second in ((one, others), (others, one)):
        usual = _spread(*second)
        found = _compared(a=_spread(*first), b=usual, c=usual)
        assert [unlike.site for unlike in found] == ["a"] * is_unlike


def test_binary_columns_and_levels_are_not_compared() -> None:
    rare, common = [0.0] * 19 + [1.0], [1.0] * 19 + [0.0]
    sums = {"a": _sums(rare, rare), "b": _sums(common, common), "c": _sums(common, common)}
    assert compare_sites(("ill", "ward=2"), sums, 2) == []
    tens = {"a": _sums(rare), "b": _sums([10 * one for one in common])}
    assert [one.site for one in compare_sites(("ill",), tens, 2)] == ["a"]


def test_a_site_with_fewer_values_than_the_floor_is_neither_compared_nor_named() -> None:
    sums = {"a": _sums([200.0] * 10), "b": _sums([210.0] * 10), "small": _sums([5.0] * 9)}
    assert compare_sites(("chol",), sums, 10) == []
    assert [one.site for one in compare_sites(("chol",), sums, 9)] == ["small"]
    missing = sums | {"small": _sums([5.0] * 9 + [math.nan] * 5)}
    assert compare_sites(("chol",), missing, 10) == [], "missing values do not count"


def test_a_site_compares_itself_with_statistics_that_it_was_given() -> None:
    statistics = FeatureStatistics(np.array([200.0, 0.5]), np.array([50.0, 0.5]))
    features = ("chol", "sex")
    own = _sums([4.0, 6.0], [0.0, 0.0])
    assert compare_with(features, own, statistics, 2) == [
        UnlikeColumn("chol", "", 5.0, 200.0, CHOL)
    ]
    assert compare_with(features, own, statistics, 3) == []
    assert compare_with(features, _sums([150.0, 260.0], [0.0, 1.0]), statistics, 2) == []
    zeros = _sums([0.0, 0.0], [0.0, 0.0])
    assert [one.column for one in compare_with(features, zeros, statistics, 2)] == ["chol"]


def test_a_page_learns_no_mean() -> None:
    low = UnlikeColumn("chol", "a", 5.0, 200.0)
    assert low.relation() == "less than a fifth of"
    assert UnlikeColumn("chol", "a", 200.0, 5.0).relation() == "more than five times"
    assert UnlikeColumn("temp", "a", 98.6, 37.0).relation() == "far from"
