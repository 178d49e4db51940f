"""Metrics of predicted masks: Dice and intersection over union, per image and over all pixels."""

import torch
from torch import Tensor


def overlaps(predicted: Tensor, masks: Tensor) -> Tensor:
    """Count the right and wrong pixels of each image by kind, (n, 4) int64.

    The columns are true positive, false positive, true negative and false negative pixels.
    ``predicted`` and the true ``masks`` are (n, h, w). Pixels of the object to find, such as a
    catheter, are not 0.
    """
    found, true = predicted.bool().flatten(1), masks.bool().flatten(1)
    pixels = torch.stack([found & true, found & ~true, ~found & ~true, ~found & true])
    return pixels.sum(dim=2).T


def image_dice(counts: Tensor) -> Tensor:
    """Compute each image's Dice score, (n,) float64, from the pixel counts of ``overlaps``.

    The score is NaN if both masks of an image are empty.
    """
    hit, false, _, missed = counts.double().unbind(dim=1)
    return 2 * hit / (2 * hit + false + missed)


def segmentation_metrics(predicted: Tensor, masks: Tensor) -> dict[str, float]:
    """Compute the metrics of predicted binary masks (n, h, w) by name, without undefined ones.

    Pixels of the object to find, such as a catheter, are not 0.

    - ``dice``: twice the common pixels, divided by the predicted plus the true pixels. It is
      averaged over the images in which either mask has the object.
    - ``jaccard``: the common pixels, divided by the pixels in either mask, averaged in the same
      way.
    - ``dice-pooled``: the Dice score over all pixels of all images together.
    - ``miou``: the mean of the object's and the background's Jaccard scores over all pixels.

    A metric is undefined if its divisor is 0.
    """
    counts = overlaps(predicted, masks)
    dice = image_dice(counts)
    dice = dice[~dice.isnan()]
    metrics: dict[str, float] = {}
    if len(dice):
        metrics["dice"] = dice.mean().item()
        # J = D / (2 - D) holds for each image, but not for the means
        metrics["jaccard"] = (dice / (2 - dice)).mean().item()
    hit, false, empty, missed = counts.sum(dim=0).tolist()
    wrong = false + missed
    if hit + wrong:
        metrics["dice-pooled"] = 2 * hit / (2 * hit + wrong)
    shares = []
    for right in (hit, empty):  # the catheter, then the background
        if right + wrong:
            shares.append(right / (right + wrong))
    if shares:
        metrics["miou"] = sum(shares) / len(shares)
    return metrics
