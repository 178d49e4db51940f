"""Calibration of probabilities after training: split conformal prediction, temperature scaling.

Split conformal prediction gives sets of classes that contain the true one with a chosen frequency.
The score of a sample is one minus the probability of its class. A set contains the classes whose
score is at most the threshold (Sadinle, Lei and Wasserman 2019). If calibration samples and new
samples come from one distribution, the set of a new sample contains its class with at least the
chosen frequency, the coverage, on average over calibrations.

Temperature scaling (Guo et al. 2017) makes probabilities more or less certain by one number T:
probabilities p become p^(1/T), normalised, which divides the logits of a softmax by T. The most
probable class stays the same.
"""

import math

import torch
from torch import Tensor


def rows_needed(coverage: float) -> int:
    """Return the smallest number of calibration samples that gives a finite conformal threshold.

    With fewer samples, each prediction set would have to contain all classes.

    Args:
        coverage: the wanted share of prediction sets that contain the true class, above 0 and below
            1. For 0.9 the result is 9.
    """
    # The smallest n with ceil((n + 1) coverage) <= n; see ``_rank`` for the tolerance
    return math.ceil(coverage / (1 - coverage) - 1e-9)


def conformity_scores(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Compute 1 minus the probability of each sample's own class, (n,), sorted ascending.

    ``probabilities`` are (n, classes), ``labels`` (n,) int64.
    """
    return (1 - probabilities.gather(1, labels[:, None])[:, 0]).sort().values


def threshold(scores: Tensor, coverage: float) -> float:
    """Return the conformal threshold of n scores, which decides the classes of a prediction set.

    The threshold is the k-th smallest score, with k = ceil((n + 1) coverage). The prediction set of
    a new sample contains each class whose score, 1 minus its probability, is at most the threshold.
    If k is more than n, the threshold is infinite, so the set contains all classes.

    Args:
        scores: the score of each calibration sample's true class, (n,), ascending.
        coverage: the wanted share of prediction sets that contain the true class.
    """
    # n + 1 and not n: the new sample is one more that could have any rank among the scores
    rank = _rank(len(scores), coverage)
    if rank > len(scores):
        return math.inf
    return float(scores[rank - 1])


def coverage_range(rows: int, coverage: float) -> tuple[float, float]:
    """Return the range in which the real coverage of prediction sets lies with probability 90 %.

    The real coverage depends on the drawn calibration samples. If no scores are equal, it has the
    Beta distribution (k, n + 1 - k) with k = ceil((n + 1) coverage) (Vovk 2012). The range runs
    from the 5 % to the 95 % quantile of this distribution.

    Args:
        rows: n, the number of calibration samples. Below ``rows_needed(coverage)``, both ends are
            NaN.
        coverage: the wanted share of prediction sets that contain the true class.
    """
    from scipy.stats import beta

    rank = _rank(rows, coverage)
    low, high = beta.ppf((0.05, 0.95), rank, rows + 1 - rank)
    return float(low), float(high)


def _rank(rows: int, coverage: float) -> int:
    """Return ceil((rows + 1) coverage), the rank from 1 of the score that is the threshold."""
    # Floating point can give 10 * 0.9 = 9.000000000000002, whose ceiling would be one rank too high
    return math.ceil((rows + 1) * coverage - 1e-9)


def prediction_sets(probabilities: Tensor, limit: float) -> Tensor:
    """Build each sample's set of possible classes, (n, classes) bool; a set may be empty.

    A class is in the set if 1 minus its probability is at most ``limit``.
    """
    return torch.le(1 - probabilities, limit)


_LEAST, _MOST = 1 / 20, 20.0  # bounds of a fitted temperature
_SMALLEST = 1e-12  # least probability, as in the reported losses


def apply_temperature(probabilities: Tensor, temperature: float) -> Tensor:
    """Rescale class probabilities by a temperature, to make them more certain or less.

    The logarithms of the probabilities are divided by the temperature, and a softmax follows.
    Temperatures above 1 make probabilities less certain. Probabilities below 1e-12 count as 1e-12.

    Args:
        probabilities: (n, classes).
        temperature: the temperature, above 0.

    Returns:
        The rescaled probabilities, (n, classes) float64.
    """
    logits = probabilities.double().clamp_min(_SMALLEST).log() / temperature
    return torch.softmax(logits, dim=1)


def fit_temperature(probabilities: Tensor, labels: Tensor) -> float:
    """Fit the temperature, from 1/20 to 20, that makes the labels most likely.

    The mean negative log-likelihood after ``apply_temperature`` is minimised by a bounded search
    over the logarithm of the temperature.

    Args:
        probabilities: class probabilities before scaling, (n, classes), with n at least 1.
        labels: the true classes, (n,) int64.
    """
    # The logarithm is searched, because 1/20 and 20 are then equally far from 1. Without bounds the
    # best temperature of a model that is always right would be 0
    from scipy.optimize import minimize_scalar

    def loss(log_temperature: float) -> float:
        return mean_loss(apply_temperature(probabilities, math.exp(log_temperature)), labels)

    bounds = (math.log(_LEAST), math.log(_MOST))
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    return math.exp(float(found.x))


def mean_loss(probabilities: Tensor, labels: Tensor) -> float:
    """Compute the mean negative log-likelihood of true classes, in nats.

    A probability below 1e-12 counts as 1e-12. Without samples the result is NaN.

    Args:
        probabilities: class probabilities, (n, classes).
        labels: the true classes, (n,) int64.
    """
    right = probabilities.gather(1, labels[:, None]).clamp_min(_SMALLEST)
    return float(-right.log().mean())
