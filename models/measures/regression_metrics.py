"""Mean predictions and outcomes by the size of the prediction, for a calibration plot.

The bins are the same at all sites, so their counts add up: tenths of a normal distribution with the
outcome's mean and standard deviation, by which the run standardises the outcome.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from fedsilo.core.metric_names import BINS, OUTCOME


def outcome_bins(
    predicted: Tensor, observed: Tensor, scale: tuple[float, float], minimum: int
) -> dict[str, float]:
    """Compute the number of samples, mean prediction and mean outcome of each bin of predictions.

    There are ten bins. Their edges are the deciles of a normal distribution with the mean and
    standard deviation in ``scale``, so they are the same at all sites. A prediction on an edge
    falls in the upper bin.

    Args:
        predicted: the predictions, (n,) float64.
        observed: the outcomes, (n,) float64, in the same unit.
        scale: the mean and standard deviation of the outcome.
        minimum: the fewest samples of a bin. Smaller bins and empty bins are left out.

    Returns:
        ``outcome.<bin>.count``, ``outcome.<bin>.predicted`` and ``outcome.<bin>.observed``. Bin 0
        has the lowest predictions.
    """
    normal = NormalDist(*scale)
    edges = [normal.inv_cdf(tenth / BINS) for tenth in range(1, BINS)]
    places = torch.bucketize(predicted, torch.tensor(edges, dtype=torch.float64), right=True)
    counts = {}
    for place in range(BINS):
        inside = places == place
        number = int(inside.sum())
        if number >= max(minimum, 1):
            name = f"{OUTCOME}.{place}"
            counts[f"{name}.count"] = float(number)
            counts[f"{name}.predicted"] = predicted[inside].mean().item()
            counts[f"{name}.observed"] = observed[inside].mean().item()
    return counts


@dataclass(frozen=True)
class OutcomeBin:
    """A bin of samples with similar predictions, in the outcome's unit."""

    count: int
    predicted: float
    observed: float


def pool_outcome_bins(metrics: Iterable[Mapping[str, float]]) -> list[OutcomeBin]:
    """Pool the bins that ``outcome_bins`` made at several sites, lowest predictions first.

    Counts are added. Mean predictions and mean outcomes are weighted by the counts. Bins that no
    site has are left out. ``metrics`` has metric -> value for each site.
    """
    pooled: dict[int, list[float]] = {}
    for by_name in metrics:
        for place in range(BINS):
            name = f"{OUTCOME}.{place}"
            count = by_name.get(f"{name}.count", 0.0)
            if not count:
                continue
            total = pooled.setdefault(place, [0.0, 0.0, 0.0])
            total[0] += count
            total[1] += count * by_name[f"{name}.predicted"]
            total[2] += count * by_name[f"{name}.observed"]
    found = []
    for _, (count, predicted, observed) in sorted(pooled.items()):
        found.append(OutcomeBin(int(count), predicted / count, observed / count))
    return found
