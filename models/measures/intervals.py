"""Figures with 95 % confidence intervals: of a share, of an AUC and of a mean over seeds.

All intervals take samples, or seeds, to be independent.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_Z = 1.959964


@dataclass(frozen=True)
class Interval:
    """A 95 % interval."""

    low: float
    high: float


def wilson(successes: int, samples: int) -> Interval:
    """Return Wilson's interval (1927) of a share, successes of samples (at least one)."""
    from scipy import stats

    found = stats.binomtest(successes, samples).proportion_ci(method="wilson")
    return Interval(float(found.low), float(found.high))


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval, if it has one."""

    value: float
    interval: Interval | None = None


def of_share(successes: int, samples: int) -> Estimate:
    """Return the share of successes in samples (at least one), with Wilson's interval."""
    return Estimate(successes / samples, wilson(successes, samples))


def of_auc(auc: float, positives: int, negatives: int) -> Interval | None:
    """Return the interval of an AUC over so many samples, or None for an AUC of 0 or 1.

    Hanley and McNeil's standard error (Radiology 143:29, 1982) in Newcombe's form (Statistics in
    Medicine 25:559, 2006), which does not depend on which of the classes is positive:
    SE² = A(1-A) (1 + N (1-A)/(2-A) + N A/(1+A)) / (n₁n₀), N = (n₁+n₀)/2 - 1.
    """
    if not 0 < auc < 1:
        return None  # no pair is in the wrong order: the standard error is 0
    each = (positives + negatives) / 2 - 1
    spread = auc * (1 - auc) * (1 + each * ((1 - auc) / (2 - auc) + auc / (1 + auc)))
    error = math.sqrt(spread / (positives * negatives))
    # Symmetric on the logit scale, the interval stays within 0 and 1
    middle, half = math.log(auc / (1 - auc)), _Z * error / (auc * (1 - auc))
    return Interval(*(1 / (1 + math.exp(-edge)) for edge in (middle - half, middle + half)))


def of_mean(
    values: Sequence[float], low: float = -math.inf, high: float = math.inf
) -> Interval | None:
    """Return Student's t interval of a mean over seeds, or None for fewer than two.

    It is cut off at ``low`` and ``high``, between which every value must be.
    """
    from scipy.stats import t

    if len(values) < 2:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    middle, half = statistics.mean(values), float(t.ppf(0.975, len(values) - 1)) * error
    return Interval(max(low, middle - half), min(high, middle + half))
