"""Measurements with Gaussian noise: means of bounded numbers, released as one noisy message.

Where each patient is to be hidden exact measurements have no place.
"""

import math
from collections.abc import Mapping

import torch

from fedsilo.models.contract.messages import measurements
from fedsilo.models.privacy.gaussian_mechanism import normals
from fedsilo.models.privacy.summed_metrics import split_of, summed_metrics

LOSS_BOUND = 3.0  # nats; a sample's loss counts as this much at most


def noisy_metrics(
    metrics: Mapping[str, float],
    sizes: Mapping[str, int],
    reported: Mapping[str, int],
    classes: int,
    noise_multiplier: float,
) -> tuple[dict[str, float], bool]:
    """Return the metrics that may leave, and whether any of them is a measurement.

    For the received model: ``accuracy``, ``loss`` (each sample's at most ``LOSS_BOUND``) and
    ``entropy`` of validation and test data. A patient moves the sum of a number in [0, R] by at
    most R; of m such sums, each in units of R √m, the whole vector by at most 1. Each gets noise of
    ``noise_multiplier`` in that unit, and is divided by the samples that the site has reported,
    because the real number is not known outside. Other measurements do not leave.

    Args:
        metrics: of the reply.
        sizes: samples of each split.
        reported: the same, as the site has reported it.
        classes: of the task, which bound the entropy.
        noise_multiplier: z.
    """
    ranges = {"accuracy": 1.0, "loss": LOSS_BOUND, "entropy": math.log(classes)}
    names = [n for n in summed_metrics(False, True, ("val", "test")) if n in metrics]
    exact = {f"{model}.{split}.{metric}" for model, split, metric, _ in measurements(metrics)}
    leaving = {name: value for name, value in metrics.items() if name not in exact}
    noise = normals(torch.Size([len(names)]), None).tolist()
    for name, draw in zip(names, noise, strict=True):
        split, range_ = split_of(name), ranges[name.rpartition(".")[2]]
        total = metrics[name] * sizes[split]
        total += noise_multiplier * range_ * math.sqrt(len(names)) * draw
        leaving[name] = min(max(total / max(1, reported[split]), 0.0), range_)
    return leaving, bool(names)
