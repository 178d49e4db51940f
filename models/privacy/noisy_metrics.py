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

    The loss is divided by its limit of 3 nats, and the entropy by log(classes). If a probability of
    a sample is not finite, all of them become 1 / classes. ``probabilities`` is (n, classes).

    Returns:
        "accuracy", "loss" and "entropy" -> contributions (n,) float64 in [0, 1].
    """
    classes = probabilities.shape[1]
    # A NaN in a sum would reveal its sample
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

    A patient is in one split and adds at most 1 to each of its metrics. The norm is therefore the
    square root of the largest number of metrics in a split. Names such as ``incoming.val.loss``
    have the split in the middle.
    """
    most = max(Counter(map(split_of, parts)).values())
    return math.sqrt(most)


def noisy_metrics(
    parts: Mapping[str, Tensor],
    reported: Mapping[str, int],
    ranges: Mapping[str, float],
    release: Release,
) -> dict[str, float]:
    """Compute the site's metrics, clipped to their ranges, with noise in one release.

    Args:
        parts: metric (such as ``incoming.val.loss``) -> contributions (n,) in [0, 1].
        reported: split -> reported number of samples, by which each noisy sum is divided.
        ranges: metric (such as ``loss``) -> largest value. The smallest is 0.
        release: decides the noise. Its bound must be ``parts_bound(parts)``.
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
        # The reported number, because the true number must stay secret
        share = float(total) / max(1, reported[split_of(name)])
        leaving[name] = min(max(share, 0.0), 1.0) * ranges[name.rpartition(".")[2]]
    return leaving
