import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsilo.core.site_facts import FeatureStatistics
from fedsilo.models.maths.standardisation import pooled_statistics, standardise, sums_of

NAN = math.nan
# Two hospitals: an age that both know, a pulse that one row lacks, a constant, and an unknown.
FIRST = torch.tensor([[1.0, 10.0, 7.0, NAN], [3.0, NAN, 7.0, NAN]])
SECOND = torch.tensor([[5.0, 20.0, 7.0, NAN]])

values = st.floats(-1000, 1000, width=32, allow_subnormal=False)
cells = values | st.just(NAN)


@st.composite
def hospitals(draw: st.DrawFn, cell: st.SearchStrategy[float] = cells) -> list[Tensor]:
    """Draw the rows of one to four hospitals of three features."""
    row = st.lists(cell, min_size=3, max_size=3)
    sizes = st.lists(st.lists(row, min_size=1, max_size=8), min_size=1, max_size=4)
    return [torch.tensor(rows, dtype=torch.float32) for rows in draw(sizes)]


def test_sums_of_rows_skip_missing_values() -> None:
    sums = sums_of(FIRST)
    assert sums.count.tolist() == [2, 1, 2, 0]
    assert sums.total.tolist() == [4, 10, 14, 0]
    assert sums.squares.tolist() == [10, 100, 98, 0]


def test_sums_are_added_up_in_double_precision() -> None:
    row = np.float32(0.1)
    sums = sums_of(torch.full((1000, 1), 0.1))
    assert sums.total[0] == pytest.approx(1000 * float(row), rel=1e-13)
    assert sums.squares[0] == pytest.approx(1000 * float(row) ** 2, rel=1e-13)


def test_pooled_statistics_of_two_hospitals_by_hand() -> None:
    statistics = pooled_statistics([sums_of(FIRST), sums_of(SECOND)])
    assert statistics.mean.tolist() == pytest.approx([3, 15, 7, 0])
    # Variances (4 + 0 + 4) / 3 and 25; what never varies or is nowhere known is only shifted.
    assert statistics.std.tolist() == pytest.approx([math.sqrt(8 / 3), 5, 1, 1])


@settings(max_examples=50, deadline=None)
@given(hospitals())
def test_pooled_statistics_equal_those_of_all_rows_concatenated(rows: list[Tensor]) -> None:
    statistics = pooled_statistics([sums_of(one) for one in rows])
    stacked = np.concatenate([one.numpy() for one in rows]).astype(np.float64)
    for feature, column in enumerate(stacked.T):
        known = column[~np.isnan(column)]
        size = float(np.abs(known).max(initial=0))
        assert statistics.mean[feature] == pytest.approx(
            known.mean() if len(known) else 0.0, rel=1e-12, abs=1e-14 * size
        )
        spread = float(known.std()) if len(known) else 0.0
        if spread > 1e-5 * size:
            assert statistics.std[feature] == pytest.approx(spread, rel=1e-5)
        elif spread <= 1e-9 * size:
            assert statistics.std[feature] == 1


@settings(max_examples=50, deadline=None)
@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 40))
def test_standardised_constant_feature_is_only_shifted(value: float, count: int) -> None:
    rows = torch.full((count, 1), value)
    statistics = pooled_statistics([sums_of(rows)])
    assert statistics.std.tolist() == [1]
    assert standardise(rows, statistics).abs().max().item() <= 1e-9 * abs(value)


def test_pooled_statistics_do_not_depend_on_the_partition() -> None:
    rows = torch.randn(30, 3, generator=torch.Generator().manual_seed(2)) * 9 + 120
    whole = pooled_statistics([sums_of(rows)])
    parts = [sums_of(part) for part in torch.split(rows, [4, 11, 15])]
    for order in itertools.permutations(parts):
        statistics = pooled_statistics(order)
        np.testing.assert_allclose(statistics.mean, whole.mean, rtol=1e-14)
        np.testing.assert_allclose(statistics.std, whole.std, rtol=1e-10)


def test_equal_sums_in_the_same_order_make_the_same_bits() -> None:
    parts = [sums_of(torch.randn(7, 3, generator=torch.Generator().manual_seed(s))) for s in (1, 2)]
    first, again = pooled_statistics(parts), pooled_statistics(list(parts))
    assert first.mean.tobytes() == again.mean.tobytes()
    assert first.std.tobytes() == again.std.tobytes()


def test_rows_become_standard_deviations_from_the_mean_and_what_is_missing_zero() -> None:
    statistics = FeatureStatistics(np.array([3.0, 15.0]), np.array([2.0, 5.0]))
    rows = torch.tensor([[1.0, 10.0], [3.0, NAN], [8.0, 25.0]])
    found = standardise(rows, statistics)
    assert found.tolist() == [[-1.0, -1.0], [0.0, 0.0], [2.5, 2.0]]
    assert found.dtype == torch.float32
    assert rows[1].isnan().tolist() == [False, True], "the rows themselves stay as they were"


def test_standardised_no_rows_are_no_rows() -> None:
    statistics = FeatureStatistics(np.zeros(2), np.ones(2))
    assert standardise(torch.empty(0, 2), statistics).shape == (0, 2)


@settings(max_examples=50, deadline=None)
@given(hospitals())
def test_standardised_by_own_statistics_a_sites_mean_row_is_zero(rows: list[Tensor]) -> None:
    for one in rows:
        statistics = pooled_statistics([sums_of(one)])
        found = standardise(one, statistics).double()
        # a float32 cell is off by 6e-8 of its size, and so is their mean
        bound = 1e-6 * max(1.0, found.abs().max().item())
        assert found.mean(dim=0).abs().max().item() <= bound


@settings(max_examples=50, deadline=None)
@given(hospitals(values))
def test_pooled_standardised_rows_have_mean_zero_and_deviation_one_or_none(
    rows: list[Tensor],
) -> None:
    statistics = pooled_statistics([sums_of(one) for one in rows])
    found = torch.cat([standardise(one, statistics) for one in rows]).double().numpy()
    stacked = np.concatenate([one.numpy() for one in rows]).astype(np.float64)
    for feature in range(3):
        spread, size = stacked[:, feature].std(), np.abs(stacked[:, feature]).max()
        if spread > 1e-4 * max(size, 1e-3):
            assert found[:, feature].mean() == pytest.approx(0.0, abs=1e-5)
            assert found[:, feature].std() == pytest.approx(1.0, rel=1e-4)
