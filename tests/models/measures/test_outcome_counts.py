"""Counts by class and by certainty: by hand, and nothing of fewer samples than the minimum."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.metric_names import BINS
from fedsilo.models.measures.outcome_counts import Bin, bins, outcome_counts

# Three of class 0, two of them found, and two of class 1, of which one is taken for 0
PROBABILITIES = torch.tensor(
    [[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.7, 0.3], [0.1, 0.9]], dtype=torch.float64
)
LABELS = torch.tensor([0, 0, 0, 1, 1])


def _classes(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("class.")}


def test_a_class_has_those_found_those_wrongly_taken_for_it_and_its_auc() -> None:
    found = _classes(outcome_counts(PROBABILITIES, LABELS, 1))
    # Of the six pairs of a sample of either class only 0.4 and 0.7 stand in the wrong order
    auc = pytest.approx(5 / 6)
    assert found == {
        "class.0.right": 2.0,
        "class.0.false": 1.0,
        "class.0.auc": auc,
        "class.1.right": 1.0,
        "class.1.false": 1.0,
        "class.1.auc": auc,
    }


def test_outcome_counts_over_too_few_samples_are_left_out() -> None:
    found = _classes(outcome_counts(PROBABILITIES, LABELS, 3))
    assert found == {"class.0.right": 2.0, "class.1.false": 1.0}
    assert outcome_counts(PROBABILITIES, LABELS, 6) == {}


def test_bins_are_by_the_largest_probability_and_by_entropy() -> None:
    found = outcome_counts(PROBABILITIES, LABELS, 5)
    assert [found[f"confidence.{place}.count"] for place in (6, 7, 8, 9)] == [1, 1, 1, 2]
    assert [found[f"confidence.{place}.right"] for place in (6, 7, 8, 9)] == [0, 0, 1, 2]
    assert found["confidence.9.mean"] == pytest.approx(0.9)
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1)) / math.log(2)  # 0.469
    assert found["uncertainty.4.count"] == 2
    assert found["uncertainty.4.mean"] == pytest.approx(entropy)


@given(st.integers(1, 30), st.integers(2, 5), st.integers(1, 12), st.integers(0, 9))
def test_no_outcome_count_of_a_class_is_over_fewer_than_the_minimum(
    samples: int, classes: int, minimum: int, seed: int
) -> None:
    torch.manual_seed(seed)
    probabilities = torch.randn(samples, classes).double().softmax(dim=1)
    labels = torch.randint(classes, (samples,))
    found = outcome_counts(probabilities, labels, minimum)
    for label in range(classes):
        has = int((labels == label).sum())
        others = samples - has
        assert (f"class.{label}.right" in found) is (has >= minimum)
        assert (f"class.{label}.false" in found) is (others >= minimum)
        assert (f"class.{label}.auc" in found) is (min(has, others) >= minimum)
    counted = [found.get(f"confidence.{place}.count", 0) for place in range(BINS)]
    assert sum(counted) == (samples if samples >= minimum else 0)


def test_bins_of_several_sites_are_added_and_empty_ones_left_out() -> None:
    one = {"confidence.7.count": 4.0, "confidence.7.right": 3.0, "confidence.7.mean": 0.75}
    one |= {"confidence.8.count": 0.0, "accuracy": 0.8}
    other = {"confidence.7.count": 6.0, "confidence.7.right": 6.0, "confidence.7.mean": 0.7}
    assert bins([one, other, {}], "confidence") == [Bin(10, 9, pytest.approx(0.72))]
    assert bins([one], "certainty") == []
