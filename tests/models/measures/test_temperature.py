import math

import pytest
import torch

from fedsilo.models.measures.temperature import apply_temperature, fit_temperature, mean_loss


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
