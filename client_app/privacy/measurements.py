"""Which measurements leave a site, and how exactly: of whole splits of enough samples.

Under a cap of the hospital's own exact figures have no place: means of bounded numbers leave with
Gaussian noise, and are entered in the hospital's ledger as one noisy message.
"""

import math
from collections.abc import Mapping

import torch

from fedsilo.models.contract.messages import INCOMING, measurements
from fedsilo.models.privacy.gaussian_noise import normals

LOSS_BOUND = 3.0  # nats; under a cap a sample's loss counts as this much at most


def of_enough(
    metrics: Mapping[str, float], sizes: Mapping[str, int], minimum: int
) -> dict[str, float]:
    """Return the metrics without measurements of splits of fewer than ``minimum`` samples."""
    few = {
        f"{model}.{split}.{metric}"
        for model, split, metric, _ in measurements(metrics)
        if sizes.get(split, 0) < minimum
    }
    return {key: value for key, value in metrics.items() if key not in few}


def noised(
    metrics: Mapping[str, float],
    sizes: Mapping[str, int],
    told: Mapping[str, int],
    classes: int,
    noise_multiplier: float,
) -> tuple[dict[str, float], bool]:
    """Return what may leave under a cap, and whether any of it is a measurement.

    Of the model that came: ``accuracy``, ``loss`` (each sample's at most ``LOSS_BOUND``) and
    ``entropy`` of validation and test data. A patient moves the sum of a number in [0, R] by at
    most R; of m such sums, each in units of R √m, the whole vector by at most 1. Each gets noise of
    ``noise_multiplier`` in that unit, and is divided by the samples that the site has told, for the
    real number is not known outside. Other measurements stay.

    Args:
        metrics: of the reply.
        sizes: samples of each split.
        told: the same as the site has told.
        classes: of the task, which bound the entropy.
        noise_multiplier: z.
    """
    ranges = {"accuracy": 1.0, "loss": LOSS_BOUND, "entropy": math.log(classes)}
    leaving = {
        f"{model}.{split}.{metric}": (value * sizes[split], ranges[metric], max(1, told[split]))
        for model, split, metric, value in measurements(metrics)
        if model == INCOMING and split in ("val", "test") and metric in ranges
    }
    kinds = {f"{m}.{s}.{k}" for m, s, k, _ in measurements(metrics)}
    others = {key: value for key, value in metrics.items() if key not in kinds}
    draws = normals(torch.Size([len(leaving)]), None).tolist()
    for (key, (total, range_, samples)), draw in zip(leaving.items(), draws, strict=True):
        unit = range_ * math.sqrt(len(leaving))
        others[key] = min(max((total + noise_multiplier * unit * draw) / samples, 0.0), range_)
    return others, bool(leaving)
