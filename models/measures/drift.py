"""The distance between the distributions of new samples and training samples (PSI)."""

import math
from collections.abc import Sequence

LARGE = 0.25  # the usual limit of PSI (Siddiqi, Credit Risk Scorecards, 2006)


def population_stability_index(expected: Sequence[int], observed: Sequence[int]) -> float:
    """Compute the population stability index (PSI), which measures the drift of new samples.

    It sums (a - e) ln(a / e) over a histogram's cells, and is 0 without drift. An empty cell counts
    as half a sample.

    Args:
        expected: the training samples per cell, with the shares e.
        observed: the new samples per cell, with the shares a.
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
    """Return the PSI that only 5 % of checks exceed if the data have no drift.

    The PSI, or population stability index, compares two histograms. Several features share the 5 %
    equally.

    Args:
        cells: the number of cells in a histogram.
        expected: the number of training samples.
        observed: the number of new samples.
        features: the number of features in one check.
    """
    from scipy.stats import chi2

    # Yurdakul and Naranjo, Journal of Risk Model Validation 14(4), 2020
    quantile = chi2.ppf(1 - 0.05 / features, max(1, cells - 1))
    return float(quantile) * (1 / expected + 1 / observed)
