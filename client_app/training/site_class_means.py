"""The mean of a network's outputs over a site's samples, for each class with enough samples."""

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
from fedsilo.models.privacy.release import Release, copy_alone
from fedsilo.models.tasks.task import task_named


@dataclass(frozen=True)
class PrivateMeans:
    """The mechanism for private means over rows, one row per patient.

    Attributes:
        release: clips a row and adds the noise; the ledger has been charged for it.
        counts: the reported training samples of each class; sums are divided by them.
    """

    release: Release
    counts: Sequence[int]

    def mean(self, rows: Tensor) -> Tensor:
        """Compute the noisy mean (d,), float32, over the rows (n, d) of all training samples.

        Each row is clipped, and Gaussian noise is added to the sum. The noisy sum is divided by the
        reported number of samples, or by 1 if that number is 0. Each call uses up one noisy answer
        whose epsilon was charged before.

        Raises:
            RuntimeError: more calls were made than were charged, which is a bug in the caller.
        """
        sums = torch.zeros(rows.shape[1:], dtype=torch.int64)
        for number in range(len(rows)):
            sums += self.release.sums({"": copy_alone(rows.cpu(), number)})[""]
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
    """Return each class's mean of ``function`` over its training samples, for large enough classes.

    In a task without classes, the task's groups of samples (strata) take their place. Private sums
    get noise, and are divided by the reported number of samples instead of the true number. At a
    real hospital they are computed one sample at a time. The network is put into eval mode, so that
    a sample's values do not depend on its batch or on chance.

    Args:
        network: placed on the compute device.
        silo: the site's data.
        compute: the device and the precision.
        function: maps inputs (batch, ...) to rows (batch, d).
        min_samples: the minimum number of samples of a class. For private means, the reported
            numbers are compared with it.
        private: the mechanism for private means; None for exact means.

    Returns:
        Class or group -> mean (d,), float32 on the CPU; empty if no class has enough samples.

    Raises:
        RuntimeError: more private means were computed than were charged, which is a bug in the
            caller.
    """
    task, split = task_named(silo.task), silo.train
    strata, classes = task.strata(split.labels), task.stratum_count(silo.shape.outputs)
    counts = torch.bincount(strata, minlength=classes).tolist()
    if private:
        counts = list(private.counts)
    # Private means use reported counts, because exact ones would reveal who is there
    large = large_classes(counts, min_samples)
    if not large:
        return {}
    network.eval()
    # Private samples go one at a time, because in a batch the last bits depend on the batch size
    alone = private is not None and private.release.alone
    parts = in_batches(split.inputs)
    if alone:
        parts = one_by_one(split.inputs)
    labels = torch.split(strata, [len(part) for part in parts])
    sums = torch.zeros((), dtype=torch.float64)
    if private:
        sums = sums.to(torch.int64)
    with torch.no_grad(), compute.autocast():
        for part, own in zip(parts, labels, strict=True):
            rows = function(float_inputs(compute.bring(part))).float().cpu()
            if private:
                # (batch, d) whole numbers, each row clipped to the bound
                rows = private.release.parts({"": rows})[""]
            sums = sums + class_sums(rows, own, classes)
    if private:
        sums = private.release.with_noise({"": sums})[""]
    return {label: (sums[label] / count).float() for label, count in large.items()}
