"""How far the distribution of new samples is from that of the training samples."""

import math
from collections.abc import Sequence

LARGE = 0.25  # the usual limit (Siddiqi, Credit Risk Scorecards, 2006)


def population_stability_index(expected: Sequence[int], found: Sequence[int]) -> float:
    """Return PSI = sum of (a - e) ln(a / e) over cells, of shares e expected and a found.

    Args:
        expected: counts of the training samples by cell.
        found: counts of the new samples by the same cells.

    An empty cell counts as half a sample, as PSI would be infinite.
    """
    pairs = zip(_shares(expected), _shares(found), strict=True)
    return sum((a - e) * math.log(a / e) for e, a in pairs)


def _shares(counts: Sequence[int]) -> list[float]:
    filled = [count or 0.5 for count in counts]
    return [count / sum(filled) for count in filled]


def psi_by_chance(cells: int, expected: int, found: int, features: int = 1) -> float:
    """Return what PSI exceeds by chance for one feature or more in 5 of 100 checks, without drift.

    PSI / (1/n + 1/m) is then about chi-squared distributed with cells - 1 degrees of freedom
    (Yurdakul and Naranjo, Journal of Risk Model Validation 14(4), 2020).

    Args:
        cells: of the feature.
        expected: number n of training samples.
        found: number m of new samples.
        features: how many are checked (Bonferroni).
    """
    from scipy.stats import chi2

    quantile = chi2.ppf(1 - 0.05 / features, max(1, cells - 1))
    return float(quantile) * (1 / expected + 1 / found)
