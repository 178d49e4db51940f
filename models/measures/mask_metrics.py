"""Metrics of predicted masks with several classes: Dice, IoU and distances between outlines.

Each metric is computed for a class in an image, then averaged over the images, then over the
classes other than the background. An image in which neither mask has the class is left out for that
class: its Dice would be 0 / 0, and counting it as 1 would reward sites with many empty masks. An
image in which only one mask has the class counts 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsilo.models.measures.segmentation_metrics import image_dice, overlaps
from fedsilo.models.measures.surface_distances import surface_distances

DICE, IOU = "dice", "iou"
SURFACE_DISTANCE, HAUSDORFF_95 = "surface-distance", "hausdorff-95"
MASK_METRICS = (DICE, IOU, SURFACE_DISTANCE, HAUSDORFF_95)


@dataclass(frozen=True)
class _ClassMetrics:
    """The metrics of one class, averaged over the images in which either mask has it."""

    images: int  # number of these images
    values: dict[str, float]  # metric -> mean, for each of ``MASK_METRICS``


def overall_metrics(predicted: Tensor, masks: Tensor, classes: int) -> dict[str, float]:
    """Average four metrics of predicted masks over the classes, except the background.

    - ``dice``: twice the common pixels, divided by the predicted pixels plus the true pixels.
    - ``iou``: the common pixels, divided by the pixels in at least one of the masks.
    - ``surface-distance``: the average distance between the outlines, in pixels.
    - ``hausdorff-95``: the 95th percentile of the distances between the outlines, in pixels.

    A class's metrics are means over the images in which either mask has the class. Classes without
    such images are left out. If no class remains, the result is empty.

    Args:
        predicted: each pixel's predicted class, (n, h, w).
        masks: each pixel's true class, (n, h, w).
        classes: the number of classes, with the background.
    """
    measured = _by_class(predicted, masks, classes).values()
    if not measured:
        return {}
    metrics = {}
    for name in MASK_METRICS:
        metrics[name] = sum(one.values[name] for one in measured) / len(measured)
    return metrics


def class_metrics(
    predicted: Tensor, masks: Tensor, classes: int, minimum: int = 1
) -> dict[str, float]:
    """Compute four metrics of predicted masks for each class, by name ``class.<c>.<metric>``.

    The metrics are ``dice``, ``iou``, ``surface-distance`` and ``hausdorff-95``
    (``overall_metrics``). Each is averaged over the images in which the predicted or the true mask
    has the class. Class 0, the background, is left out.

    Args:
        predicted: each pixel's predicted class, (n, h, w).
        masks: each pixel's true class, (n, h, w).
        classes: the number of classes, with the background.
        minimum: the smallest number of such images. A class with fewer is left out.
    """
    metrics = {}
    for number, measured in _by_class(predicted, masks, classes).items():
        if measured.images < minimum:
            continue
        for name, value in measured.values.items():
            metrics[f"class.{number}.{name}"] = value
    return metrics


def _by_class(predicted: Tensor, masks: Tensor, classes: int) -> dict[int, _ClassMetrics]:
    """Measure how well each class is segmented, except class 0, the background.

    The metrics are Dice, IoU, and the average and the 95 % Hausdorff distance between outlines.
    Each metric is averaged over the images in which the predicted or the true mask has the class. A
    class that occurs in no mask is left out.

    Args:
        predicted: each pixel's predicted class, (n, h, w).
        masks: each pixel's true class, (n, h, w).
        classes: the number of classes, with the background.

    Returns:
        Class -> the averages of the metrics, and the number of images in these averages.
    """
    found = {}
    for number in range(1, classes):
        measured = _measure_class(predicted == number, masks == number)
        if measured:
            found[number] = measured
    return found


def _measure_class(found: Tensor, truth: Tensor) -> _ClassMetrics | None:
    """Average the metrics of one class over the images in which either mask has the class.

    The metrics are Dice, IoU, and the average and the 95 % Hausdorff distance between the outlines
    (``surface_distances``). If only one of an image's masks has the class, Dice and IoU are 0. The
    two distances are then the length of the image's diagonal.

    Args:
        found: the pixels that are predicted as the class, (n, h, w) bool.
        truth: the pixels that have the class, (n, h, w) bool.

    Returns:
        The averages and the number of averaged images. None if no image has the class.
    """
    dice = image_dice(overlaps(found, truth))
    dice = dice[~dice.isnan()]
    if not len(dice):
        return None
    averages, farthest = [], []
    for one, other in zip(found.cpu().numpy(), truth.cpu().numpy(), strict=True):
        distances = surface_distances(one, other)
        if distances:
            averages.append(distances.average)
            farthest.append(distances.percentile_95)
    values = {
        DICE: dice.mean().item(),
        # J = D / (2 - D) holds for each image, but not for the means
        IOU: (dice / (2 - dice)).mean().item(),
        SURFACE_DISTANCE: sum(averages) / len(averages),
        HAUSDORFF_95: sum(farthest) / len(farthest),
    }
    return _ClassMetrics(len(dice), values)


def image_scores(predicted: Tensor, masks: Tensor, classes: int) -> Tensor:
    """Compute each image's Dice score, averaged over its classes, (n,) float64.

    Only classes in the predicted or the true mask of the image count, without the background. The
    score is NaN if both masks contain only background.

    Args:
        predicted: each pixel's predicted class, (n, h, w).
        masks: each pixel's true class, (n, h, w).
        classes: the number of classes, with the background.
    """
    scores = [
        image_dice(overlaps(predicted == number, masks == number)) for number in range(1, classes)
    ]
    return torch.stack(scores).nanmean(dim=0)


def dominant_classes(masks: Tensor) -> Tensor:
    """Return the class with the most pixels in each mask, without the background, (n,) int64.

    On a tie the class with the lower index is taken. A mask of only background gets 0.

    Args:
        masks: each pixel's class, (n, h, w).
    """
    most = torch.zeros(len(masks), dtype=torch.int64)
    chosen = torch.zeros(len(masks), dtype=torch.int64)
    highest = int(masks.max()) if len(masks) else 0
    for number in range(1, highest + 1):
        pixels = (masks == number).flatten(1).sum(dim=1)
        chosen = torch.where(pixels > most, number, chosen)
        most = torch.maximum(pixels, most)
    return chosen
