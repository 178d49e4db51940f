"""The distance between the distributions of new samples and training samples (PSI)."""

import math
from collections.abc import Sequence

LARGE = 0.25  # the usual limit of PSI (Siddiqi, Credit Risk Scorecards, 2006)


def population_stability_index(expected: Sequence[int], found: Sequence[int]) -> float:
    """Compute PSI = sum of (a - e) ln(a / e) over cells; e and a are shares of samples.

    An empty cell counts as half a sample, because PSI would be infinite otherwise.

    Args:
        expected: training samples in each cell, which give e.
        found: new samples in the same cells, which give a.
    """
    index = 0.0
    for e, a in zip(_shares(expected), _shares(found), strict=True):
        index += (a - e) * math.log(a / e)
    return index


def _shares(counts: Sequence[int]) -> list[float]:
    """Return the share of each cell in all samples, above 0."""
    filled = [count or 0.5 for count in counts]
    whole = sum(filled)
    return [count / whole for count in filled]


def psi_by_chance(cells: int, expected: int, found: int, features: int = 1) -> float:
    """Return the PSI that chance exceeds in 5 of 100 checks of data without drift.

    Without drift PSI / (1/n + 1/m) is about chi-squared distributed with cells - 1 degrees of
    freedom (Yurdakul and Naranjo, Journal of Risk Model Validation 14(4), 2020).

    Args:
        cells: number of cells of the feature.
        expected: number n of training samples.
        found: number m of new samples.
        features: number of features in one check; the 5 % are divided among them (Bonferroni).
    """
    from scipy.stats import chi2

    quantile = chi2.ppf(1 - 0.05 / features, max(1, cells - 1))
    return float(quantile) * (1 / expected + 1 / found)
