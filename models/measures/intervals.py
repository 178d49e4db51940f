"""95 % confidence intervals for a share, an AUC and a mean over seeds.

All intervals assume that samples, or seeds, are independent.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_Z = 1.959964  # the 97.5 % quantile of the standard normal distribution
_TINY = 1e-6  # an AUC of float32 that is 1 may be less by so much


@dataclass(frozen=True)
class Interval:
    """A 95 % confidence interval."""

    low: float
    high: float


def wilson(successes: int, samples: int) -> Interval:
    """Compute Wilson's 95 % confidence interval for the share ``successes`` / ``samples``.

    There must be at least one sample.
    """
    from scipy import stats

    found = stats.binomtest(successes, samples).proportion_ci(method="wilson")
    return Interval(float(found.low), float(found.high))


@dataclass(frozen=True)
class Estimate:
    """An estimated value with its 95 % interval; the interval is None if it is not defined."""

    value: float
    interval: Interval | None = None


def of_share(successes: int, samples: int) -> Estimate:
    """Compute ``successes`` divided by ``samples`` (at least 1), with Wilson's interval."""
    return Estimate(successes / samples, wilson(successes, samples))


def of_auc(auc: float, positives: int, negatives: int) -> Interval | None:
    """Compute the 95 % confidence interval of an AUC, or return None if the AUC is 0 or 1.

    The standard error is Hanley and McNeil's (1982) in Newcombe's form (2006), which stays the same
    if the classes are swapped:

        SE² = A(1-A) (1 + N (1-A)/(2-A) + N A/(1+A)) / (n₁n₀), with N = (n₁+n₀)/2 - 1

    The interval is symmetric in logit(A), so it stays within 0 and 1.

    Args:
        auc: A, the AUC.
        positives: n₁, the number of positive samples, at least 1.
        negatives: n₀, the number of negative samples, at least 1.
    """
    if not _TINY < auc < 1 - _TINY:
        # All pairs are in the same order, so the standard error would be 0
        return None
    # Radiology 143:29 and Statistics in Medicine 25:559
    each = (positives + negatives) / 2 - 1
    spread = auc * (1 - auc) * (1 + each * ((1 - auc) / (2 - auc) + auc / (1 + auc)))
    error = math.sqrt(spread / (positives * negatives))
    # The interval is symmetric on the logit scale and mapped back, so it stays within 0 and 1.
    # The derivative of the logit is 1 / (A (1 - A)), hence the divisor
    middle, half = math.log(auc / (1 - auc)), _Z * error / (auc * (1 - auc))
    low, high = middle - half, middle + half
    return Interval(1 / (1 + math.exp(-low)), 1 / (1 + math.exp(-high)))


def of_mean(
    values: Sequence[float], low: float = -math.inf, high: float = math.inf
) -> Interval | None:
    """Compute Student's 95 % t interval for the mean of ``values``, such as one value per seed.

    The result is None for fewer than two values. Equal values give an interval of length 0. The
    interval is clipped to ``low`` and ``high``, the range of possible values.
    """
    from scipy.stats import t

    if len(values) < 2:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    middle, half = statistics.mean(values), float(t.ppf(0.975, len(values) - 1)) * error
    return Interval(max(low, middle - half), min(high, middle + half))
