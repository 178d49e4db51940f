"""Measurements with Gaussian noise: means of bounded numbers, released as one noisy message.

Where each patient is to be hidden exact measurements have no place. Of the received model, and of
validation and test data, three leave: ``accuracy``, ``loss`` (each sample's at most ``LOSS_BOUND``)
and ``entropy``. Each is a mean of a number between 0 and its range.
"""

import math
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedsilo.models.privacy.release import Release
from fedsilo.models.privacy.summed_metrics import split_of

LOSS_BOUND = 3.0  # nats; a sample's loss counts as this much at most


def bounded_parts(probabilities: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Compute each sample's part in the sum of a measurement: (n,) in [0, 1], by metric.

    A sample without finite probabilities counts as one of which nothing is known: a sum that is
    not finite would tell that it is there.

    Args:
        probabilities: (n, classes) float64.
        labels: (n,).
    """
    classes = probabilities.shape[1]
    known = probabilities.isfinite().all(dim=1, keepdim=True)
    probabilities = torch.where(known, probabilities, 1 / classes)
    losses = nn.functional.nll_loss(probabilities.clamp_min(1e-12).log(), labels, reduction="none")
    parts = {
        "accuracy": (probabilities.argmax(dim=1) == labels).double(),
        "loss": losses / LOSS_BOUND,
        "entropy": torch.special.entr(probabilities).sum(dim=1) / math.log(classes),
    }
    return {metric: values.double().clamp(0.0, 1.0) for metric, values in parts.items()}


def range_of(name: str, classes: int) -> float:
    """Return the largest value of a measurement, of which the least is 0."""
    return {"accuracy": 1.0, "loss": LOSS_BOUND, "entropy": math.log(classes)}[
        name.rpartition(".")[2]
    ]


def parts_bound(parts: Mapping[str, Tensor]) -> float:
    """Return the largest norm of a patient's part: it is in one split, by m numbers of [0, 1]."""
    most = max(Counter(split_of(name) for name in parts).values())
    return math.sqrt(most)


def noisy_metrics(
    parts: Mapping[str, Tensor], reported: Mapping[str, int], classes: int, release: Release
) -> dict[str, float]:
    """Return measurements with noise, as one message.

    Each sum is divided by the samples that the site has reported, because the real number is not
    known outside.

    Args:
        parts: of each sample of a measurement's split (n,), in [0, 1], by measurement.
        reported: samples of each split, as the site has reported them.
        classes: of the task, which bound the entropy.
        release: whose bound is that of ``parts_bound``.
    """
    sums: dict[str, Tensor] = {}
    for split in sorted({split_of(name) for name in parts}):
        names = [name for name in sorted(parts) if split_of(name) == split]
        sums |= release.sums({name: parts[name] for name in names})
    leaving = {}
    for name, total in release.with_noise(sums).items():
        share = float(total) / max(1, reported[split_of(name)])
        leaving[name] = min(max(share, 0.0), 1.0) * range_of(name, classes)
    return leaving
