"""The distance between the distributions of new samples and training samples (PSI)."""

import math
from collections.abc import Sequence

LARGE = 0.25  # the usual limit of PSI (Siddiqi, Credit Risk Scorecards, 2006)


def population_stability_index(expected: Sequence[int], observed: Sequence[int]) -> float:
    """Compute the population stability index (PSI), which measures the drift of new samples.

    The PSI is the sum of (a - e) ln(a / e) over the cells of a histogram. It is 0 if new samples
    have the shares of the training samples. An empty cell is treated as if it had half a sample,
    because the PSI would otherwise be infinite.

    Args:
        expected: the number of training samples in each cell, whose shares are e.
        observed: the number of new samples in the same cells, whose shares are a.
    """
    index = 0.0
    for e, a in zip(_shares(expected), _shares(observed), strict=True):
        index += (a - e) * math.log(a / e)
    return index


def _shares(counts: Sequence[int]) -> list[float]:
    """Return each cell's share of all samples; an empty cell counts as half a sample."""
    filled = [count or 0.5 for count in counts]
    whole = sum(filled)
    return [count / whole for count in filled]


def psi_by_chance(cells: int, expected: int, observed: int, features: int = 1) -> float:
    """Return the PSI that is exceeded in only 5 % of checks if the data have no drift.

    The PSI (population stability index) compares the histogram of new samples with that of training
    samples. Without drift, PSI / (1/n + 1/m) is approximately chi-squared with cells - 1 degrees of
    freedom. For several features, each one gets an equal part of the 5 % (Bonferroni).

    Args:
        cells: the number of cells in the feature's histogram. 1 counts as 2.
        expected: n, the number of training samples, at least 1.
        observed: m, the number of new samples, at least 1.
        features: the number of features in one check, at least 1.
    """
    from scipy.stats import chi2

    # Yurdakul and Naranjo, Journal of Risk Model Validation 14(4), 2020
    quantile = chi2.ppf(1 - 0.05 / features, max(1, cells - 1))
    return float(quantile) * (1 / expected + 1 / observed)
