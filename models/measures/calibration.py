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
    """Return the fewest calibration samples with which the conformal threshold is finite.

    With fewer samples, each prediction set would have to contain all classes. ``coverage``, above 0
    and below 1, is the wanted share of prediction sets that contain the true class. For a coverage
    of 0.9 the result is 9.
    """
    # The smallest n with ceil((n + 1) coverage) <= n; see ``_rank`` for the tolerance
    return math.ceil(coverage / (1 - coverage) - 1e-9)


def conformity_scores(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Compute 1 minus the probability of each sample's own class, (n,), sorted ascending.

    ``probabilities`` are (n, classes), ``labels`` (n,) int64.
    """
    return (1 - probabilities.gather(1, labels[:, None])[:, 0]).sort().values


def threshold(scores: Tensor, coverage: float) -> float:
    """Return the conformal threshold: the ceil((n + 1) coverage)-th smallest of n scores.

    The prediction set of a new sample contains each class whose score, 1 minus its probability, is
    at most the threshold. With fewer than ``rows_needed`` scores the threshold is infinite, so that
    the set contains all classes.

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

    The real coverage depends on the calibration samples that happen to be drawn. Without ties it
    follows a Beta(k, n + 1 - k) distribution with k = ceil((n + 1) coverage) (Vovk 2012). The
    results are its 5 % and 95 % quantiles.

    Args:
        rows: n, the number of calibration samples. Below ``rows_needed(coverage)``, both results
            are NaN.
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
    """Rescale class probabilities (n, classes) by a temperature above 0; the result is float64.

    The logarithms of the probabilities are divided by the temperature, and a softmax follows. A
    temperature above 1 makes probabilities less certain, below 1 more certain. Probabilities below
    1e-12 count as 1e-12.
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
    """Compute the mean negative log-likelihood of the labels (n,), in nats.

    ``probabilities`` are (n, classes); a probability below 1e-12 counts as 1e-12. Without samples
    the result is NaN.
    """
    right = probabilities.gather(1, labels[:, None]).clamp_min(_SMALLEST)
    return float(-right.log().mean())
