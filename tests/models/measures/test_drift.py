"""The population stability index, by hand."""

import math

import pytest

from fedsilo.models.measures.drift import population_stability_index, psi_by_chance


def test_psi_of_the_same_shares_is_zero() -> None:
    assert population_stability_index([50, 30, 20], [5, 3, 2]) == pytest.approx(0)


def test_psi_of_two_cells_is_the_sum_by_hand() -> None:
    by_hand = (0.9 - 0.5) * math.log(0.9 / 0.5) + (0.1 - 0.5) * math.log(0.1 / 0.5)
    assert by_hand == pytest.approx(0.8789, abs=1e-4)
    assert population_stability_index([50, 50], [90, 10]) == pytest.approx(by_hand)


def test_psi_counts_an_empty_cell_as_half_a_sample() -> None:
    full, empty = 9.5 / 10, 0.5 / 10
    assert full + empty == 1
    by_hand = (full - 0.5) * math.log(full / 0.5) + (empty - 0.5) * math.log(empty / 0.5)
    found = population_stability_index([50, 50], [19, 0])
    shares = 19 / 19.5, 0.5 / 19.5
    assert found == pytest.approx(sum((a - 0.5) * math.log(a / 0.5) for a in shares))
    assert found > by_hand


def test_psi_by_chance_is_chi_squared_over_the_numbers_of_samples() -> None:
    assert psi_by_chance(2, 100, 50) == pytest.approx(3.8415 * (0.01 + 0.02), abs=1e-4)
    assert psi_by_chance(10, 100, 50) == pytest.approx(16.919 * (0.01 + 0.02), abs=1e-3)
    assert psi_by_chance(2, 100, 50, features=5) == pytest.approx(6.6349 * 0.03, abs=1e-4)
