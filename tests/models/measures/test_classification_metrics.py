from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsilo.models.measures.classification_metrics import (
    CALIBRATION_BINS,
    bin_counts,
    classification_metrics,
)


def of(rows: list[list[float]], labels: list[int]) -> dict[str, float]:
    return classification_metrics(torch.tensor(rows, dtype=torch.float64), torch.tensor(labels))


def of_second(shares: list[float], labels: list[int]) -> dict[str, float]:
    """Return the evidence of two classes by the probability of the second."""
    return of([[1 - share, share] for share in shares], labels)


def test_balanced_accuracy_is_the_mean_recall_and_not_the_share_of_hits() -> None:
    # Four of class 0, all found; two of class 1, one found: recalls 1 and 0.5, accuracy 5 / 6.
    found = of_second([0.1, 0.2, 0.3, 0.4, 0.9, 0.2], [0, 0, 0, 0, 1, 1])
    assert found["balanced-accuracy"] == pytest.approx(0.75)


def test_always_the_larger_class_has_a_balanced_accuracy_of_a_half() -> None:
    assert of_second([0.1] * 10, [0] * 9 + [1])["balanced-accuracy"] == pytest.approx(0.5)


def test_the_calibration_error_is_the_weighted_gap_between_confidence_and_hits_of_a_bin() -> None:
    # Confidences 0.9 (three times, two hits) and 0.6 (one, a miss) lie in bins of their own:
    # 3/4 * |2/3 - 0.9| + 1/4 * |0 - 0.6|
    found = of_second([0.9, 0.9, 0.9, 0.6], [1, 1, 0, 0])
    assert found["calibration-error"] == pytest.approx(0.75 * (0.9 - 2 / 3) + 0.25 * 0.6)


def test_confidences_of_one_bin_are_averaged_before_they_are_compared() -> None:
    assert CALIBRATION_BINS == 15
    # 0.81 and 0.85 share the bin from 12/15 to 13/15, 0.79 does not: |0.83 - 0.5| and |0.79 - 1|
    found = of_second([0.81, 0.85, 0.79], [1, 0, 1])
    assert found["calibration-error"] == pytest.approx(2 / 3 * 0.33 + 1 / 3 * 0.21)


def test_sure_and_right_is_without_calibration_error() -> None:
    assert of_second([1.0, 0.0, 1.0], [1, 0, 1])["calibration-error"] == pytest.approx(0.0)


def test_auc_is_the_share_of_pairs_in_the_right_order_and_ties_count_half() -> None:
    # Sick 0.8, 0.4 against healthy 0.4, 0.3, 0.1: 0.8 wins three, 0.4 ties one and wins two.
    found = of_second([0.8, 0.4, 0.4, 0.3, 0.1], [1, 1, 0, 0, 0])
    assert found["auc"] == pytest.approx(5.5 / 6)


def test_auc_looks_at_the_order_alone_and_not_at_the_threshold() -> None:
    found = of_second([0.2, 0.1, 0.05], [1, 0, 0])
    assert found["auc"] == pytest.approx(1.0)
    assert found["balanced-accuracy"] == pytest.approx(0.5)


@pytest.mark.parametrize("label", [0, 1])
def test_labels_of_one_class_have_calibration_and_nothing_that_compares_classes(label: int) -> None:
    found = of_second([0.9, 0.6, 0.2], [label] * 3)
    # Each confidence is alone in its bin: 0.9, 0.6 and 0.8 for classes 1, 1 and 0
    hits = (1, 1, 0) if label else (0, 0, 1)
    gaps = [abs(sure - hit) for sure, hit in zip((0.9, 0.6, 0.8), hits, strict=True)]
    assert found == {"calibration-error": pytest.approx(sum(gaps) / 3)}


THREE = [[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.5, 0.3], [0.3, 0.1, 0.6]]


def test_the_auc_of_three_classes_is_the_mean_of_one_against_the_rest() -> None:
    found = of(THREE, [0, 1, 1, 2, 2])
    # Class 0: 0.7 above all. Class 1: 0.3, 0.6 against 0.2, 0.5, 0.1, five of six.
    # Class 2: 0.3, 0.6 against 0.1, 0.2, 0.3: five and a tie of six.
    assert found["auc"] == pytest.approx((1 + 5 / 6 + 5.5 / 6) / 3)
    assert found["balanced-accuracy"] == pytest.approx((1 + 0.5 + 0.5) / 3)


def test_three_classes_of_which_one_does_not_occur_have_no_auc_and_recalls_of_the_others() -> None:
    found = of(THREE, [0, 1, 1, 1, 0])
    assert "auc" not in found
    # Class 0: one of two; class 1: two of three.
    assert found["balanced-accuracy"] == pytest.approx((1 / 2 + 2 / 3) / 2)


def test_one_sample_has_metrics_too() -> None:
    found = of_second([0.3], [0])
    assert found == {"calibration-error": pytest.approx(0.3)}


@st.composite
def predictions(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Draw class probabilities and labels of up to twelve samples."""
    classes, count = draw(st.integers(2, 4)), draw(st.integers(1, 12))
    weight = st.lists(st.integers(1, 20), min_size=classes, max_size=classes)
    rows = torch.tensor(draw(st.lists(weight, min_size=count, max_size=count))).double()
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=count, max_size=count))
    return rows / rows.sum(dim=1, keepdim=True), torch.tensor(labels)


@settings(max_examples=30, deadline=None)
@given(predictions(), st.randoms(use_true_random=False))
def test_metrics_are_shares_and_do_not_depend_on_the_order_of_samples(
    case: tuple[Tensor, Tensor], random: Random
) -> None:
    probabilities, labels = case
    found = classification_metrics(probabilities, labels)
    assert all(0 <= value <= 1 + 1e-9 for value in found.values())
    assert ("auc" in found) == (len(labels.unique()) == probabilities.shape[1])
    assert ("balanced-accuracy" in found) == (len(labels.unique()) > 1)
    order = list(range(len(labels)))
    random.shuffle(order)
    again = classification_metrics(probabilities[order], labels[order])
    assert again == pytest.approx(found, abs=1e-6)


def test_bins_hold_count_hits_and_mean_and_the_last_one_holds_one() -> None:
    values = torch.tensor([0.0, 0.125, 0.25, 0.375, 0.875, 1.0])
    right = torch.tensor([True, False, True, True, False, True])
    # Bins of a quarter: 0 and 0.125; 0.25 begins the second; the third is empty; 0.875 and 1
    expected = [(2, 1, 0.0625), (2, 2, 0.3125), (0, 0, 0.0), (2, 1, 0.9375)]
    assert bin_counts(values, right, 4) == {
        f"{place}.{part}": value
        for place, row in enumerate(expected)
        for part, value in zip(("count", "right", "mean"), row, strict=True)
    }


def test_one_bin_holds_everything_and_its_mean_is_the_mean() -> None:
    found = bin_counts(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([True, True, False]), 1)
    assert found == {"0.count": 3, "0.right": 2, "0.mean": 0.5}


def test_values_a_rounding_error_beyond_one_or_below_zero_stay_in_the_outer_bins() -> None:
    found = bin_counts(torch.tensor([1.0000001, -1e-7]), torch.tensor([True, True]), 10)
    assert (found["9.count"], found["0.count"]) == (1, 1)
