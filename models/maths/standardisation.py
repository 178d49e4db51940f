"""Standardising features by statistics that are pooled from sums, never from rows.

Per feature a site sends the number of known values, their sum and the sum of their squares; over
all sites they give the mean and standard deviation of all training rows (PICSR notes, step 1).
Statistics of each site's own would make the mean row of every site zero, and PICSR's prototypes
with it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedsilo.models.contract.site_facts import FeatureStatistics, Sums


def sums_of(rows: Tensor) -> Sums:
    """Return the sums over ``rows`` (n, features), in which NaN marks a missing value."""
    values = rows.numpy().astype(np.float64)
    known = np.where(np.isnan(values), 0.0, values)
    return Sums((~np.isnan(values)).sum(axis=0), known.sum(axis=0), (known**2).sum(axis=0))


def pooled_statistics(sums: Sequence[Sums]) -> FeatureStatistics:
    """Return the statistics of all rows behind ``sums``, added in the order given.

    The standard deviation is divided by n, not by n - 1. A feature that is constant, or unknown
    everywhere, gets 1: it is only shifted.
    """
    count, total, squares = (
        np.sum([getattr(one, part) for one in sums], axis=0, dtype=np.float64)
        for part in ("count", "total", "squares")
    )
    known = np.maximum(count, 1)
    mean = total / known
    variance = squares / known - mean**2
    # A constant feature's variance is not 0 but rounding error, about 1e-16 of its square
    varies = variance > 1e-12 * np.maximum(squares / known, 1e-300)
    return FeatureStatistics(mean, np.sqrt(np.where(varies, variance, 1.0)))


def standardise(rows: Tensor, statistics: FeatureStatistics) -> Tensor:
    """Return ``rows`` (n, features) in standard deviations from the mean, float32.

    A missing value becomes 0: it is imputed by the mean.
    """
    values = (rows.numpy().astype(np.float64) - statistics.mean) / statistics.std
    return torch.from_numpy(np.nan_to_num(values, nan=0.0).astype(np.float32))
