"""The mean of what a network makes of a site's samples, per class that has enough of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.evaluation import in_batches, one_by_one
from fedsilo.datasets.silo.silos import Silo
from fedsilo.models.maths.class_means import class_sums, large_classes
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.site_network import SiteNetwork
from fedsilo.models.privacy.release import Release, apart


@dataclass(frozen=True)
class PrivateMeans:
    """What makes means of rows, one a patient, private.

    Attributes:
        release: bounds a row, and has been paid for.
        counts: training samples of each class as the site has reported them; sums are divided by
            these.
    """

    release: Release
    counts: Sequence[int]

    def mean(self, rows: Tensor) -> Tensor:
        """Return the private mean (d,) of all training samples' rows (n, d), float32."""
        sums = torch.zeros(rows.shape[1:], dtype=torch.int64)
        for number in range(len(rows)):
            sums += self.release.sums({"": apart(rows.cpu(), number)})[""]
        total = self.release.with_noise({"": sums})[""]
        return (total / max(1, sum(self.counts))).float()


def class_means(
    network: SiteNetwork,
    silo: Silo,
    compute: Compute,
    function: Callable[[Tensor], Tensor],
    min_samples: int,
    private: PrivateMeans | None = None,
) -> dict[int, Tensor]:
    """Return the mean of ``function`` over the samples of each class that has enough of them.

    The network is put in eval mode: in training mode batch norm and dropout would make a sample's
    values depend on its batch and on chance. Batch by batch, so that no split's embeddings are ever
    in memory at once; sums are float64 in the order of the samples, private ones whole numbers.

    Args:
        network: placed on the compute device.
        silo: what the site holds; the means are of its training samples.
        compute: device and precision.
        function: maps inputs (batch, ...) to rows (batch, d).
        min_samples: samples that must be behind a mean.
        private: bounds each sample's part, or None.

    Returns:
        Class to mean (d,), float32 on the CPU.
    """
    split, classes = silo.train, silo.task.classes
    counts = torch.bincount(split.labels, minlength=classes).tolist()
    if private:
        counts = list(private.counts)
    large = large_classes(counts, min_samples)
    if not large:
        return {}
    network.eval()
    # Privately one sample at a time: in a batch its last bits depend on how many others there are
    alone = private is not None and private.release.alone
    parts = one_by_one(split.inputs) if alone else in_batches(split.inputs)
    labels = torch.split(split.labels, [len(part) for part in parts])
    sums = torch.zeros((), dtype=torch.int64 if private else torch.float64)
    with torch.no_grad(), compute.autocast():
        for part, own in zip(parts, labels, strict=True):
            rows = function(float_inputs(compute.bring(part))).float().cpu()
            rows = private.release.parts({"": rows})[""] if private else rows
            sums = sums + class_sums(rows, own, classes)
    sums = private.release.with_noise({"": sums})[""] if private else sums
    return {label: (sums[label] / count).float() for label, count in large.items()}
