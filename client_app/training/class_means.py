"""The mean of what a network makes of a site's samples, per class that has enough of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.evaluation import in_batches
from fedsilo.datasets.silo.silos import Silo
from fedsilo.models.maths.class_means import class_sums, large_classes
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.site_network import SiteNetwork


def class_means(
    network: SiteNetwork,
    silo: Silo,
    compute: Compute,
    function: Callable[[Tensor], Tensor],
    min_samples: int,
) -> dict[int, Tensor]:
    """Return the mean of ``function`` over the samples of each class that has enough of them.

    The network is put in eval mode: in training mode batch norm and dropout would make a sample's
    values depend on its batch and on chance. Batch by batch, so that no split's embeddings are ever
    held at once; sums are float64 in the order of the samples.

    Args:
        network: placed on the compute device.
        silo: what the site holds; the means are of its training samples.
        compute: device and precision.
        function: maps inputs (batch, ...) to rows (batch, d).
        min_samples: samples that must be behind a mean.

    Returns:
        Class to mean (d,), float32 on the CPU.
    """
    split, classes = silo.train, silo.task.classes
    counts = torch.bincount(split.labels, minlength=classes).tolist()
    large = large_classes(counts, min_samples)
    if not large:
        return {}
    network.eval()
    parts = in_batches(split.inputs)
    labels = torch.split(split.labels, [len(part) for part in parts])
    with torch.no_grad(), compute.autocast():
        sums = sum(
            (
                class_sums(function(float_inputs(compute.bring(part))).float().cpu(), own, classes)
                for part, own in zip(parts, labels, strict=True)
            ),
            start=torch.zeros((), dtype=torch.float64),
        )
    return {label: (sums[label] / count).float() for label, count in large.items()}
