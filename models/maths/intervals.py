"""Intervals of what is measured on few samples: how far a figure may be off by chance alone."""

from __future__ import annotations

import math

LEVEL = 0.95
_Z = 1.959963984540054  # of the normal distribution, two-sided


def share_interval(right: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval (1927) of a share, ``right`` of ``count`` samples."""
    share, square = right / count, _Z**2 / count
    centre = share + square / 2
    spread = _Z * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return (centre - spread) / (1 + square), (centre + spread) / (1 + square)


def auc_interval(auc: float, positives: int, negatives: int) -> tuple[float, float]:
    """Return the 95 % interval of the AUC of two classes, by Hanley and McNeil's variance (1982).

    It is cut to 0..1, and too narrow where the AUC is near its ends or samples are few.
    """
    two_positives, two_negatives = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    variance = (
        auc * (1 - auc)
        + (positives - 1) * (two_positives - auc**2)
        + (negatives - 1) * (two_negatives - auc**2)
    ) / (positives * negatives)
    spread = _Z * math.sqrt(max(variance, 0.0))
    return max(auc - spread, 0.0), min(auc + spread, 1.0)
