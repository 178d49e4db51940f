"""Metrics of predicted masks: Dice and intersection over union, by image and by pixel."""

import torch
from torch import Tensor


def overlaps(predicted: Tensor, masks: Tensor) -> Tensor:
    """Return true and false positives, true and false negatives of each image, (n, 4) int64.

    ``predicted`` and the true ``masks`` are (n, h, w), 1 on the catheter.
    """
    found, true = predicted.bool().flatten(1), masks.bool().flatten(1)
    pixels = torch.stack([found & true, found & ~true, ~found & ~true, ~found & true])
    return pixels.sum(dim=2).T


def image_dice(counts: Tensor) -> Tensor:
    """Return the Dice of each image, (n,) float64, of ``overlaps``; NaN if both masks are empty."""
    hit, false, _, missed = counts.double().unbind(dim=1)
    return 2 * hit / (2 * hit + false + missed)


def segmentation_metrics(predicted: Tensor, masks: Tensor) -> dict[str, float]:
    """Return the metrics of binary masks (n, h, w) that are defined.

    ``dice`` is the catheter's 2 |P and T| / (|P| + |T|) and ``jaccard`` its |P and T| / |P or T|,
    averaged over the images in which P or T is not empty. ``dice-pooled`` is the Dice of all pixels
    of all images, ``miou`` the mean of the pooled Jaccard of background and catheter.
    """
    counts = overlaps(predicted, masks)
    dice = image_dice(counts)
    dice = dice[~dice.isnan()]
    metrics: dict[str, float] = {}
    if len(dice):
        metrics["dice"] = dice.mean().item()
        metrics["jaccard"] = (dice / (2 - dice)).mean().item()
    hit, false, empty, missed = counts.sum(dim=0).tolist()
    wrong = false + missed
    if hit + wrong:
        metrics["dice-pooled"] = 2 * hit / (2 * hit + wrong)
    unions = [(right, right + wrong) for right in (hit, empty) if right + wrong]
    if unions:
        metrics["miou"] = sum(right / union for right, union in unions) / len(unions)
    return metrics
