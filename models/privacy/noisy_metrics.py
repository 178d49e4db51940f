"""Measurements with Gaussian noise: means of bounded numbers, released as one noisy message.

Exact measurements would reveal single patients. So three measurements leave a private site, for the
received model on validation and test data: ``accuracy``, ``loss`` (each sample at most
``LOSS_BOUND``) and ``entropy``. Each is the mean of a number between 0 and its range.
"""

import math
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedsilo.models.privacy.release import Release
from fedsilo.models.privacy.summed_metrics import split_of

LOSS_BOUND = 3.0  # nats; a sample's larger loss counts as 3


def bounded_parts(probabilities: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Compute each sample's contribution to the site's accuracy, loss and entropy.

    A loss above 3 nats (``LOSS_BOUND``) counts as 3 nats. If one of a sample's probabilities is not
    finite, each of them is replaced by 1 / classes, because a NaN in a sum would reveal that
    sample.

    Args:
        probabilities: (n, classes) float64.
        labels: (n,) int64.

    Returns:
        "accuracy", "loss" and "entropy" -> contributions (n,) float64 in [0, 1]. The loss is
        divided by 3 nats, and the entropy by log(classes).
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


def parts_bound(parts: Mapping[str, Tensor]) -> float:
    """Return the largest possible L2 norm of one patient's contributions to all ``parts``.

    The names of ``parts`` have the form ``incoming.val.loss``, with the split in the middle, and
    only the names are read. A patient is in one split and adds at most 1 to each of its metrics.
    The norm is therefore the square root of the largest number of metrics in a split.
    """
    most = max(Counter(map(split_of, parts)).values())
    return math.sqrt(most)


def noisy_metrics(
    parts: Mapping[str, Tensor],
    reported: Mapping[str, int],
    ranges: Mapping[str, float],
    release: Release,
) -> dict[str, float]:
    """Compute the site's metrics with noise, all in one release.

    Each noisy sum is divided by the reported number of samples, because the true number must stay
    secret.

    Args:
        parts: metric (such as ``incoming.val.loss``) -> contributions (n,) in [0, 1] of the n
            samples in the metric's split.
        reported: split -> number of samples that the site has reported. 0 counts as 1.
        ranges: metric (such as ``loss``) -> its largest value, where every contribution is 1. Its
            smallest value is 0.
        release: clips the contributions and adds the noise. Its bound must be
            ``parts_bound(parts)``.

    Returns:
        Metric -> value, clipped to its range.
    """
    sums: dict[str, Tensor] = {}
    by_split: dict[str, dict[str, Tensor]] = {}
    for name, values in sorted(parts.items()):
        by_split.setdefault(split_of(name), {})[name] = values
    # A patient is in one split only. So a patient's part, one row of each array, is clipped within
    # that split, and the arrays of other splits have other rows
    for _, values_of_split in sorted(by_split.items()):
        sums |= release.sums(values_of_split)
    leaving = {}
    for name, total in release.with_noise(sums).items():
        share = float(total) / max(1, reported[split_of(name)])
        leaving[name] = min(max(share, 0.0), 1.0) * ranges[name.rpartition(".")[2]]
    return leaving
