"""Metrics of predicted masks with several classes: Dice, IoU and distances between outlines.

Each metric is computed for a class in an image, then averaged over the images, then over the
classes other than the background. An image in which neither mask has the class is left out for that
class: its Dice would be 0 / 0, and counting it as 1 would reward sites with many empty masks. An
image in which only one mask has the class counts 0.
"""

import torch
from torch import Tensor

from fedsilo.models.measures.segmentation_metrics import image_dice, overlaps
from fedsilo.models.measures.surface_distances import surface_distances

DICE, IOU = "dice", "iou"
SURFACE_DISTANCE, HAUSDORFF_95 = "surface-distance", "hausdorff-95"
MASK_METRICS = (DICE, IOU, SURFACE_DISTANCE, HAUSDORFF_95)


def mask_metrics(predicted: Tensor, masks: Tensor, classes: int) -> dict[str, float]:
    """Compute the metrics of predicted masks for each class and on average, by name.

    ``class.<c>.<metric>`` is the mean over the images for class c, counted from 1 because class 0
    is the background. ``<metric>`` is the mean over these classes. The metrics are:

    - ``dice``: 2 |P and T| / (|P| + |T|) of the predicted pixels P and the true pixels T, 0 to 1.
    - ``iou``: |P and T| / |P or T|, 0 to 1.
    - ``surface-distance``: the average distance between the outlines, in pixels.
    - ``hausdorff-95``: the 95 % Hausdorff distance between the outlines, in pixels.

    A class that is in no mask of any image has no metrics and is left out of the means. If that
    holds for all classes, the result is empty.

    Args:
        predicted: each pixel's predicted class, (n, h, w).
        masks: each pixel's true class, (n, h, w).
        classes: the number of classes, with the background.
    """
    metrics: dict[str, float] = {}
    of_classes: dict[str, list[float]] = {name: [] for name in MASK_METRICS}
    for number in range(1, classes):
        for name, value in _class_metrics(predicted == number, masks == number).items():
            metrics[f"class.{number}.{name}"] = value
            of_classes[name].append(value)
    for name, values in of_classes.items():
        if values:
            metrics[name] = sum(values) / len(values)
    return metrics


def _class_metrics(found: Tensor, truth: Tensor) -> dict[str, float]:
    """Average the four metrics of one class over the images; {} if no image has the class.

    ``found`` and ``truth`` are (n, h, w) bool.
    """
    dice = image_dice(overlaps(found, truth))
    dice = dice[~dice.isnan()]
    if not len(dice):
        return {}
    averages, farthest = [], []
    for one, other in zip(found.cpu().numpy(), truth.cpu().numpy(), strict=True):
        distances = surface_distances(one, other)
        if distances:
            averages.append(distances.average)
            farthest.append(distances.percentile_95)
    return {
        DICE: dice.mean().item(),
        # J = D / (2 - D) holds for each image, but not for the means
        IOU: (dice / (2 - dice)).mean().item(),
        SURFACE_DISTANCE: sum(averages) / len(averages),
        HAUSDORFF_95: sum(farthest) / len(farthest),
    }


def image_scores(predicted: Tensor, masks: Tensor, classes: int) -> Tensor:
    """Compute each image's Dice, averaged over the classes that either mask has, (n,) float64.

    The background does not count. The score is NaN for an image in which both masks are empty.

    Args:
        predicted: each pixel's predicted class, (n, h, w).
        masks: each pixel's true class, (n, h, w).
        classes: the number of classes, with the background.
    """
    scores = [
        image_dice(overlaps(predicted == number, masks == number)) for number in range(1, classes)
    ]
    return torch.stack(scores).nanmean(dim=0)


def dominant_classes(masks: Tensor, classes: int) -> Tensor:
    """Return the class with the most pixels of each mask, besides the background, (n,) int64.

    It is 0, the background, for an empty mask. The lower class decides a tie. So every image counts
    for exactly one class, and the counts add up to the number of images.

    Args:
        masks: each pixel's class, (n, h, w).
        classes: the number of classes, with the background.
    """
    pixels = [(masks == number).flatten(1).sum(dim=1) for number in range(1, classes)]
    most, place = torch.stack(pixels, dim=1).max(dim=1)
    return torch.where(most > 0, place + 1, 0)
