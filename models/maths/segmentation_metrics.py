"""What predicted masks are worth: Dice and intersection over union, by image and by pixel."""

from __future__ import annotations

import torch
from torch import Tensor


def overlaps(predicted: Tensor, masks: Tensor) -> Tensor:
    """Return, per image, pixels hit, falsely marked, rightly unmarked and missed, (n, 4) int64.

    Args:
        predicted: (n, h, w), 1 on the catheter.
        masks: the truth, likewise.
    """
    found, true = predicted.bool().flatten(1), masks.bool().flatten(1)
    pixels = torch.stack([found & true, found & ~true, ~found & ~true, ~found & true])
    return pixels.sum(dim=2).T


def image_dice(counts: Tensor) -> Tensor:
    """Return the Dice of each image, (n,) float64, of ``overlaps``; NaN if nothing is on either."""
    hit, false, _, missed = counts.double().unbind(dim=1)
    return 2 * hit / (2 * hit + false + missed)


def segmentation_figures(predicted: Tensor, masks: Tensor) -> dict[str, float]:
    """Return ``dice``, ``jaccard``, ``dice-pooled`` and ``miou`` of binary masks (n, h, w).

    ``dice`` is the catheter's 2D Dice 2 |P and T| / (|P| + |T|) of each image, ``jaccard`` its
    |P and T| / |P or T|, both averaged over the images. An image without a catheter in which none
    is found has neither and is left out; one in which some is found counts 0. ``dice-pooled`` is
    the Dice of all pixels of all images taken together. ``miou`` is the mean of the Jaccard of
    background and catheter, each over all pixels. What is undefined is left out.
    """
    counts = overlaps(predicted, masks)
    dice = image_dice(counts)
    dice = dice[~dice.isnan()]
    figures: dict[str, float] = {}
    if len(dice):
        figures["dice"] = dice.mean().item()
        figures["jaccard"] = (dice / (2 - dice)).mean().item()
    hit, false, empty, missed = counts.sum(dim=0).tolist()
    wrong = false + missed
    if hit + wrong:
        figures["dice-pooled"] = 2 * hit / (2 * hit + wrong)
    unions = [(right, right + wrong) for right in (hit, empty) if right + wrong]
    if unions:
        figures["miou"] = sum(right / union for right, union in unions) / len(unions)
    return figures
