from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from models.maths.intervals import auc_interval, share_interval


@given(st.integers(1, 500), st.floats(0, 1))
def test_the_interval_of_a_share_is_scipys_wilson(count: int, share: float) -> None:
    right = round(share * count)
    theirs = binomtest(right, count).proportion_ci(method="wilson")
    low, high = share_interval(right, count)
    assert low == pytest.approx(theirs.low, abs=1e-9)
    assert high == pytest.approx(theirs.high, abs=1e-9)


def test_the_interval_of_an_auc_by_hand() -> None:
    """At 0.5 with 10 and 10: q1 = q2 = 1/3, the variance (0.25 + 9/12 + 9/12) / 100 = 0.0175."""
    low, high = auc_interval(0.5, 10, 10)
    assert high - 0.5 == pytest.approx(1.96 * math.sqrt(0.0175), rel=1e-4)
    assert 0.5 - low == pytest.approx(high - 0.5)


@given(st.floats(0, 1), st.integers(1, 1000), st.integers(1, 1000))
def test_an_interval_holds_its_auc_and_stays_in_range(
    auc: float, positives: int, negatives: int
) -> None:
    low, high = auc_interval(auc, positives, negatives)
    assert 0 <= low <= auc <= high <= 1
