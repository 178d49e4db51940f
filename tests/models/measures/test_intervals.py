"""Intervals against published examples and against what they must be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.models.measures.intervals import of_auc, of_mean, wilson


def test_a_share_has_wilsons_interval() -> None:
    # Newcombe, Statistics in Medicine 17:857 (1998), table I, method 3
    for right, samples, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)]:
        found = wilson(right, samples)
        assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)
    assert wilson(0, 20).low == 0.0
    assert wilson(20, 20).high == 1.0


def test_an_auc_has_the_interval_that_one_computes_by_hand() -> None:
    # A = 0.8 of 21 and 21: N = 20, SE² = 0.16 (1 + 20 (1/6 + 4/9)) / 441 = 0.0047972
    # logit 1.38629 ± 1.95996 · 0.0692618 / 0.16 = 1.38629 ± 0.84845
    found = of_auc(0.8, 21, 21)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.63131, 0.90333), abs=1e-4)
    assert of_auc(1.0, 21, 21) is None
    assert of_auc(0.0, 21, 21) is None


@given(st.floats(0.01, 0.99), st.integers(1, 500), st.integers(1, 500))
def test_an_auc_lies_in_its_interval_which_is_that_of_the_other_class_too(
    auc: float, positives: int, negatives: int
) -> None:
    found = of_auc(auc, positives, negatives)
    assert found is not None
    assert 0 <= found.low < auc < found.high <= 1
    assert of_auc(auc, negatives, positives) == found


def test_a_mean_over_seeds_has_students_interval() -> None:
    # Mean 2, sd 1, standard error 0.57735, t of 2 degrees of freedom 4.30265
    found = of_mean([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.low, found.high) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-5)
    assert of_mean([1.0]) is None
    same = of_mean([0.5, 0.5])
    assert same is not None
    assert (same.low, same.high) == (0.5, 0.5)


def test_values_that_differ_by_rounding_give_a_narrow_interval_without_a_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    found = of_mean([0.75 - 0.7, 0.85 - 0.8])
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.05, 0.05), abs=1e-14)
    assert not recwarn.list


def test_interval_of_a_mean_is_cut_off_at_the_possible_range() -> None:
    free, cut = of_mean([0.95, 1.0]), of_mean([0.95, 1.0], 0.0, 1.0)
    assert free is not None
    assert cut is not None
    assert free.high > 1
    assert (cut.low, cut.high) == (free.low, 1.0)
