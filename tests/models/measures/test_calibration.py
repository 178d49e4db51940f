import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from fedsilo.models.measures.calibration import (
    apply_temperature,
    conformity_scores,
    coverage_range,
    fit_temperature,
    mean_loss,
    prediction_sets,
    rows_needed,
    threshold,
)

NINE = torch.arange(1, 10).double() / 10


def test_the_threshold_is_the_score_of_the_rank_that_the_coverage_asks_for() -> None:
    """Of nine scores the ceil(10 c)-th: by hand."""
    assert threshold(NINE, 0.9) == pytest.approx(0.9)
    assert threshold(NINE, 0.8) == pytest.approx(0.8)
    assert threshold(NINE, 0.75) == pytest.approx(0.8)
    assert threshold(NINE, 0.1) == pytest.approx(0.1)
    assert math.isinf(threshold(NINE, 0.91))


@given(st.floats(0.01, 0.999))
def test_fewer_rows_than_are_needed_have_no_threshold(coverage: float) -> None:
    needed = rows_needed(coverage)
    assert math.isinf(threshold(torch.zeros(needed - 1), coverage))
    assert not math.isinf(threshold(torch.zeros(needed), coverage))


@pytest.mark.parametrize(
    ("coverage", "rows"), [(0.5, 1), (0.8, 4), (0.9, 9), (0.95, 19), (0.99, 99)]
)
def test_so_many_rows_are_needed(coverage: float, rows: int) -> None:
    assert rows_needed(coverage) == rows


def test_a_set_holds_the_classes_whose_score_is_at_most_the_threshold() -> None:
    probabilities = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25]], dtype=torch.float64)
    assert conformity_scores(probabilities, torch.tensor([0, 2])).tolist() == pytest.approx(
        [0.3, 0.75]
    )
    assert prediction_sets(probabilities, 0.7).tolist() == [
        [True, False, False],
        [True, True, False],
    ]
    assert prediction_sets(probabilities, 0.1).tolist() == [3 * [False], 3 * [False]]
    assert prediction_sets(probabilities, 1.0).all()


def made_up(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities of a model that is far too sure, and labels."""
    logits = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(logits, dim=1), 1, generator=generator)[:, 0]
    return torch.softmax(3 * logits, dim=1), labels


@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
def test_the_coverage_on_made_up_data_is_within_binomial_bounds(coverage: float) -> None:
    """Of 2,000 calibrations on 39 rows each, one new row each: a miss is a coin of 1 - coverage.

    With 39 rows (n + 1) c is whole, so the coverage is exactly c.
    """
    generator, covered, draws = torch.Generator().manual_seed(3), 0, 2000
    for _ in range(draws):
        probabilities, labels = made_up(40, generator)
        limit = threshold(conformity_scores(probabilities[:39], labels[:39]), coverage)
        covered += bool(prediction_sets(probabilities[39:], limit)[0, labels[39]])
    low, high = binom.ppf((0.0005, 0.9995), draws, coverage)
    assert low <= covered <= high


@pytest.mark.parametrize(("rows", "coverage"), [(19, 0.9), (17, 0.9), (99, 0.95)])
def test_the_range_of_one_calibrations_coverage_is_that_of_many(rows: int, coverage: float) -> None:
    """Scores are uniform here, so that a threshold is its own coverage."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(4000, rows, generator=generator, dtype=torch.float64).sort(dim=1).values
    limits = torch.tensor([threshold(row, coverage) for row in scores])
    low, high = coverage_range(rows, coverage)
    assert ((limits >= low) & (limits <= high)).double().mean() == pytest.approx(0.9, abs=0.02)
    assert (limits < low).double().mean() == pytest.approx(0.05, abs=0.015)


def test_a_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, -2.0], [0.0, 0.5, 0.25]], dtype=torch.float64)
    warm = apply_temperature(torch.softmax(logits, dim=1), 2.5)
    assert torch.allclose(warm, torch.softmax(logits / 2.5, dim=1))
    assert torch.equal(warm.argmax(dim=1), logits.argmax(dim=1))
    same = torch.softmax(logits, dim=1)
    assert torch.allclose(apply_temperature(same, 1.0), same)


def test_the_temperature_of_two_classes_by_hand() -> None:
    """It says 0.9 and is right in three of four: at T the 9 to 1 must be 3 to 1, so T = 2."""
    probabilities = torch.tensor([[0.9, 0.1]] * 4, dtype=torch.float64)
    labels = torch.tensor([0, 0, 0, 1])
    found = fit_temperature(probabilities, labels)
    assert found == pytest.approx(math.log(9) / math.log(3), rel=1e-4)
    assert apply_temperature(probabilities, found)[0, 0].item() == pytest.approx(0.75, abs=1e-4)
    assert mean_loss(apply_temperature(probabilities, found), labels) < mean_loss(
        probabilities, labels
    )


def test_a_model_that_is_always_right_gets_the_least_temperature() -> None:
    probabilities = torch.tensor([[0.6, 0.4]] * 5, dtype=torch.float64)
    assert fit_temperature(probabilities, torch.zeros(5, dtype=torch.int64)) == pytest.approx(
        1 / 20, rel=1e-3
    )


def test_a_probability_of_zero_is_no_infinite_loss() -> None:
    probabilities = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    found = fit_temperature(probabilities, torch.tensor([0, 1]))
    assert math.isfinite(mean_loss(apply_temperature(probabilities, found), torch.tensor([0, 1])))
