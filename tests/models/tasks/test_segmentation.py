"""The task segmentation: its loss and metrics by hand, and the groups that a site counts."""

import math

import pytest
import torch

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.tasks.task import task_named, task_of

TASK = task_named("segmentation")
MASKS = torch.tensor([[[0, 1], [1, 1]], [[0, 0], [0, 0]], [[2, 2], [1, 0]]], dtype=torch.uint8)


def test_an_image_is_counted_by_its_largest_class() -> None:
    assert TASK.strata(MASKS).tolist() == [1, 0, 2]
    assert TASK.stratum_count(3) == 3
    stand_in = TASK.stand_in_labels([1, 0, 2], 3)
    assert TASK.strata(stand_in).tolist() == [0, 2, 2]


def test_only_empty_masks_are_odd() -> None:
    assert TASK.odd_counts([4, 0, 0])
    assert not TASK.odd_counts([0, 4, 0])
    assert not TASK.odd_counts([])
    assert not TASK.odd_counts([0, 0, 0])


def test_the_loss_is_cross_entropy_plus_the_weighted_dice_loss() -> None:
    # Even odds of two classes: log 2 a pixel. Half of 4 pixels are marked by half each, and 3 truly
    logits, mask = torch.zeros(1, 2, 2, 2), MASKS[:1]
    dice = 1 - (2 * 1.5 + 1) / (2 + 3 + 1)
    for weight in (0.0, 1.0, 2.0):
        loss = task_of(CommonSettings(task="segmentation", dice_weight=weight)).criterion()
        assert loss(logits, mask).item() == pytest.approx(math.log(2) + weight * dice)


def test_metrics_of_a_perfect_prediction() -> None:
    predictions = torch.nn.functional.one_hot(MASKS.long(), 3).permute(0, 3, 1, 2).double()
    assert TASK.metrics(predictions, MASKS) == {
        "loss": 0,
        "dice": 1,
        "iou": 1,
        "surface-distance": 0,
        "hausdorff-95": 0,
    }
    # Class 1 is in two images, and class 2 in one
    assert {name.rpartition(".")[0] for name in TASK.counts(predictions, MASKS, 2)} == {"class.1"}
