"""Metrics of masks with classes, on squares whose overlaps and distances one can count."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedsilo.models.measures.mask_metrics import (
    class_metrics,
    dominant_classes,
    image_scores,
    overall_metrics,
)
from fedsilo.models.measures.surface_distances import surface_distances

SIZE = 10
DIAGONAL = math.hypot(SIZE, SIZE)


def square(top: int, left: int, side: int, value: int = 1) -> Tensor:
    """Return a mask (10, 10) with one square of a class; side 0 makes it empty."""
    mask = torch.zeros(SIZE, SIZE, dtype=torch.uint8)
    mask[top : top + side, left : left + side] = value
    return mask


def test_a_square_moved_by_one_pixel() -> None:
    # Two 4x4 squares share 3 columns of 4 pixels: 12 of 16 each, 20 in their union. Of 12 outline
    # pixels, the 4 in the far column are 1 pixel away, and so are the 2 inner ones of the near
    # column, beside which the other outline passes
    pair = square(2, 3, 4)[None], square(2, 2, 4)[None]
    metrics = overall_metrics(*pair, 2)
    assert metrics["dice"] == pytest.approx(24 / 32)
    assert metrics["iou"] == pytest.approx(12 / 20)
    assert metrics["surface-distance"] == pytest.approx(12 / 24)
    assert metrics["hausdorff-95"] == 1
    assert class_metrics(*pair, 2) == {f"class.1.{name}": v for name, v in metrics.items()}
    assert class_metrics(*pair, 2, minimum=2) == {}


def test_a_single_pixel_three_and_four_away() -> None:
    distances = surface_distances(square(1, 1, 1).bool().numpy(), square(4, 5, 1).bool().numpy())
    assert distances is not None
    assert (distances.average, distances.percentile_95) == (5, 5)


def test_images_with_one_empty_mask_count_0_and_with_two_empty_ones_not_at_all() -> None:
    empty, full = square(0, 0, 0), square(2, 2, 4)
    predicted = torch.stack([empty, full, empty, full])
    masks = torch.stack([empty, empty, full, full])
    metrics = overall_metrics(predicted, masks, 2)
    assert metrics["dice"] == metrics["iou"] == pytest.approx(1 / 3)
    assert metrics["surface-distance"] == pytest.approx(2 / 3 * DIAGONAL)
    assert image_scores(predicted, masks, 2).tolist() == pytest.approx(
        [math.nan, 0, 0, 1], nan_ok=True
    )
    assert overall_metrics(predicted[:1], masks[:1], 2) == {}


def test_the_mean_is_over_the_classes_that_occur() -> None:
    # Class 1 is found as it is, class 2 is missed, class 3 is nowhere
    truth = square(0, 0, 2, 1) + square(5, 5, 2, 2)
    pair = square(0, 0, 2, 1)[None], truth[None]
    metrics = class_metrics(*pair, 4)
    assert (metrics["class.1.dice"], metrics["class.2.dice"]) == (1, 0)
    assert "class.3.dice" not in metrics
    assert overall_metrics(*pair, 4)["dice"] == 0.5
    assert image_scores(square(0, 0, 2, 1)[None], truth[None], 4).tolist() == [0.5]


def test_an_image_counts_for_its_largest_class() -> None:
    masks = torch.stack([square(0, 0, 0), square(0, 0, 3, 2) + square(5, 5, 2, 1), square(0, 0, 1)])
    assert dominant_classes(masks).tolist() == [0, 2, 1]
    assert dominant_classes(masks[:0]).tolist() == []


@given(st.lists(st.integers(0, 2), min_size=50, max_size=50))
def test_a_mask_compared_with_itself_is_perfect(values: list[int]) -> None:
    masks = torch.tensor(values).reshape(2, 5, 5)
    metrics = overall_metrics(masks, masks, 3)
    for name, value in metrics.items():
        assert value == (1 if name.endswith(("dice", "iou")) else 0)
    assert dominant_classes(masks).shape == (2,)
