"""Split conformal prediction: sets of classes that hold the true one with a chosen frequency.

The score of a sample is one minus the probability of its class, and a set holds the classes whose
score is at most the threshold (Sadinle, Lei and Wasserman 2019). If calibration samples and new
ones come from one distribution, the set of a new one holds its class with at least the coverage, in
the mean over calibrations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rows_needed(coverage: float) -> int:
    """Return the fewest calibration samples whose threshold is below infinity."""
    return math.ceil(coverage / (1 - coverage) - 1e-9)


def conformity_scores(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return one minus the probability of each sample's class.

    Args:
        probabilities: (n, classes), rows summing to 1.
        labels: (n,) int64.

    Returns:
        (n,), ascending.
    """
    return (1 - probabilities.gather(1, labels[:, None])[:, 0]).sort().values


def threshold(scores: Tensor, coverage: float) -> float:
    """Return the ceil((n + 1) coverage)-th smallest of ascending ``scores`` (n,).

    With fewer than ``rows_needed`` it is infinite: only the set of all classes is sure to cover.
    """
    rank = _rank(len(scores), coverage)
    return math.inf if rank > len(scores) else float(scores[rank - 1])


def coverage_range(rows: int, coverage: float) -> tuple[float, float]:
    """Return where the coverage of one calibration of so many rows lies nine times in ten.

    Over calibrations it is Beta(k, n + 1 - k) with k = ceil((n + 1) coverage), if no two scores
    are equal (Vovk 2012).
    """
    from scipy.stats import beta

    rank = _rank(rows, coverage)
    low, high = beta.ppf((0.05, 0.95), rank, rows + 1 - rank)
    return float(low), float(high)


def _rank(rows: int, coverage: float) -> int:
    # 10 * 0.9 is 9.000000000000002 in some orders of rounding
    return math.ceil((rows + 1) * coverage - 1e-9)


def prediction_sets(probabilities: Tensor, limit: float) -> Tensor:
    """Return which classes are in each sample's set: (n, classes) bool; none may be."""
    return torch.le(1 - probabilities, limit)
