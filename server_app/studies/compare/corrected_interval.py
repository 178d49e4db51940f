"""Intervals for repeated cross-validation, whose runs share training rows (Nadeau, Bengio 2003)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Interval:
    """A mean over runs with its 95 % interval, and the p value of the mean being 0.

    A single run has neither interval nor p value: they are None.
    """

    mean: float
    low: float | None
    high: float | None
    p: float | None
    runs: int

    def within(self, lowest: float, highest: float) -> Interval:
        """Return it with its interval cut to what the figure can be."""
        if self.low is None or self.high is None:
            return self
        return replace(self, low=max(self.low, lowest), high=min(self.high, highest))


def corrected_interval(values: Sequence[float], folds: int) -> Interval:
    """Return the corrected resampled t interval of ``values``, one per run.

    The variance of the mean is (1/J + n_test/n_train) s^2 over J runs, where n_test/n_train is
    1 / (folds - 1): the plain 1/J would take runs for independent that share training rows.

    Args:
        values: one figure per run, or one difference between two methods on the same split.
        folds: folds of the cross-validation.
    """
    from scipy import stats

    mean, runs = statistics.fmean(values), len(values)
    if runs == 1:
        return Interval(mean, None, None, None, runs)
    error = math.sqrt(1 / runs + 1 / (folds - 1)) * statistics.stdev(values)
    if error == 0:
        return Interval(mean, mean, mean, 1.0 if mean == 0 else 0.0, runs)
    half = float(stats.t.ppf(0.975, runs - 1)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, runs - 1))
    return Interval(mean, mean - half, mean + half, p, runs)
