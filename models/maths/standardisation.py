"""Standardise features by statistics that are pooled from sums, never from rows.

For each feature a site sends the number of known values, their sum and the sum of their squares.
Over all sites these give the mean and standard deviation of all training rows (PICSR notes, step
1). If each site used its own statistics, every site's mean row would be 0, and all PICSR prototypes
would be equal.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedsilo.core.site_facts import FeatureStatistics, Sums


def sums_of(rows: Tensor) -> Sums:
    """Compute each feature's count, sum and sum of squares over ``rows`` (n, features).

    NaN marks a missing value, which adds 0 to all three. Each of the three has the shape
    (features,). The sums are float64.
    """
    # float64, because pooling subtracts squares that nearly cancel
    values = rows.numpy().astype(np.float64)
    known = np.where(np.isnan(values), 0.0, values)
    return Sums((~np.isnan(values)).sum(axis=0), known.sum(axis=0), (known**2).sum(axis=0))


def pooled_statistics(sums: Sequence[Sums]) -> FeatureStatistics:
    """Combine the sums of several sites into each feature's mean and deviation over all sites.

    The variance is divided by n, not by n - 1. A feature counts as constant if its deviation is at
    most a millionth of the root mean square of its values. A constant feature gets the deviation 1,
    so that standardising only shifts it. A feature without any value gets mean 0 and deviation 1.

    Args:
        sums: the sums of each site, for at least one site.
    """
    count = np.sum([site.count for site in sums], axis=0, dtype=np.float64)
    total = np.sum([site.total for site in sums], axis=0, dtype=np.float64)
    squares = np.sum([site.squares for site in sums], axis=0, dtype=np.float64)
    known = np.maximum(count, 1)
    mean = total / known
    variance = squares / known - mean**2
    # The variance of a constant feature is not exactly 0 but a rounding error, about 1e-16 of its
    # square. Without the tolerance such noise would be scaled up to standard deviation 1
    varies = variance > 1e-12 * np.maximum(squares / known, 1e-300)
    return FeatureStatistics(mean, np.sqrt(np.where(varies, variance, 1.0)))


def standardise(rows: Tensor, statistics: FeatureStatistics) -> Tensor:
    """Subtract the mean from ``rows`` (n, features) and divide by the standard deviation.

    The result is float32. A missing value (NaN) becomes 0, which imputes the mean.
    """
    values = (rows.numpy().astype(np.float64) - statistics.mean) / statistics.std
    return torch.from_numpy(np.nan_to_num(values, nan=0.0).astype(np.float32))
