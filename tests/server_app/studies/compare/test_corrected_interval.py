from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedsilo.server_app.studies.compare.corrected_interval import Interval, corrected_interval

VALUES = [0.70, 0.80, 0.90, 0.80]  # mean 0.8, sum of squares 0.02, variance 0.02 / 3
FIGURES = st.lists(st.floats(-1, 1), min_size=2, max_size=25)


def test_the_interval_of_four_runs_of_five_folds_by_hand() -> None:
    found = corrected_interval(VALUES, folds=5)
    # (1/4 + 1/4) * 0.02 / 3 = 0.01 / 3, and t of 3 degrees of freedom is 3.182 at 97.5 %
    half = 3.182446 * math.sqrt(0.01 / 3)
    assert found.mean == pytest.approx(0.8)
    assert found.low == pytest.approx(0.8 - half, abs=1e-6)
    assert found.high == pytest.approx(0.8 + half, abs=1e-6)
    assert found.runs == 4


def test_the_p_value_is_that_of_the_corrected_t() -> None:
    differences = [0.01, 0.03, -0.01, 0.02, 0.05]
    error = math.sqrt((1 / 5 + 1 / 2) * statistics.variance(differences))
    expected = 2 * (1 - stats.t.cdf(0.02 / error, 4))
    assert corrected_interval(differences, folds=3).p == pytest.approx(expected, rel=1e-9)
    assert 0.1 < expected < 0.9


def test_the_p_value_does_not_depend_on_the_sign_of_a_difference() -> None:
    one, other = corrected_interval(VALUES, 5), corrected_interval([-v for v in VALUES], 5)
    assert one.p == pytest.approx(other.p)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))


def test_an_interval_that_ends_at_zero_has_p_of_five_percent() -> None:
    spread = corrected_interval(VALUES, 5)
    shifted = [value - spread.low for value in VALUES]
    found = corrected_interval(shifted, 5)
    assert found.low == pytest.approx(0, abs=1e-12)
    assert found.p == pytest.approx(0.05, rel=1e-6)


@pytest.mark.parametrize(("value", "p"), [(0.25, 0.0), (0.0, 1.0), (-0.25, 0.0)])
def test_runs_that_all_say_the_same_have_no_width(value: float, p: float) -> None:
    assert corrected_interval([value] * 3, 5) == Interval(value, value, value, p, 3)


def test_one_run_says_nothing_of_the_spread() -> None:
    assert corrected_interval([0.3], 5) == Interval(0.3, None, None, None, 1)


@pytest.mark.parametrize(
    ("low", "high", "cut"),
    [(-0.1, 1.2, (0, 1)), (-0.1, 0.9, (0, 0.9)), (0.7, 1.2, (0.7, 1)), (0.7, 0.9, (0.7, 0.9))],
)
def test_an_interval_is_cut_to_what_the_figure_can_be(
    low: float, high: float, cut: tuple[float, float]
) -> None:
    whole = Interval(0.8, low, high, 0.01, 5)
    assert whole.within(0, 1) == Interval(0.8, *cut, 0.01, 5)
    assert (whole.low, whole.high) == (low, high)


def test_of_one_run_there_is_nothing_to_cut() -> None:
    one = corrected_interval([0.3], 5)
    assert one.within(0.5, 1) == one


@given(FIGURES, st.integers(2, 10))
def test_the_interval_is_wider_than_the_naive_one_and_has_the_mean_in_its_middle(
    values: list[float], folds: int
) -> None:
    found, runs = corrected_interval(values, folds), len(values)
    naive = stats.t.ppf(0.975, runs - 1) * statistics.stdev(values) / math.sqrt(runs)
    half = (found.high - found.low) / 2
    factor = math.sqrt(1 + runs / (folds - 1))
    assert half == pytest.approx(naive * factor, rel=1e-6, abs=1e-12)
    assert factor > 1
    assert (found.low + found.high) / 2 == pytest.approx(found.mean, abs=1e-9)


def test_more_runs_over_the_same_folds_do_not_make_it_arbitrarily_narrow() -> None:
    many = corrected_interval(VALUES * 500, folds=5)
    floor = stats.norm.ppf(0.975) * math.sqrt(statistics.variance(VALUES * 500) / 4)
    assert (many.high - many.low) / 2 > floor
