"""Class means that sites share, and the loss that pulls towards them (FedProto, FedDistill)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsilo.models.contract.errors import SiteError


@dataclass(frozen=True)
class ClassTargets:
    """A vector for each class that has one."""

    values: Tensor  # (classes, d) float32, 0 for a class that has none
    known: Tensor  # (classes,) bool, which classes have one

    def to(self, device: torch.device) -> ClassTargets:
        """Return the same on ``device``."""
        return ClassTargets(self.values.to(device), self.known.to(device))


def large_classes(counts: Sequence[int], min_samples: int) -> dict[int, int]:
    """Return the classes whose mean may leave a site, with their numbers of samples.

    The mean of few samples nearly reveals one of them. Both ends apply this rule to the counts of
    training samples by class, so that the server expects just the means that a site sends.
    """
    return {label: count for label, count in enumerate(counts) if count >= min_samples}


def class_targets(
    arrays: Mapping[str, Tensor], prefix: str, classes: int, size: int
) -> ClassTargets | None:
    """Return the targets in ``arrays``, named ``<prefix><class>``, or None if it is empty.

    Raises:
        SiteError: an array has no such class, is not (size,), or not finite.
    """
    values, known = torch.zeros(classes, size), torch.zeros(classes, dtype=torch.bool)
    names = {f"{prefix}{label}": label for label in range(classes)}
    for name, array in arrays.items():
        if name not in names:
            fault = f"there are {classes} classes, from 0"
        elif array.shape != (size,):
            fault = f"it is {tuple(array.shape)}, not ({size},)"
        elif not array.isfinite().all():
            fault = "it contains non-finite values"
        else:
            values[names[name]], known[names[name]] = array, True
            continue
        raise SiteError(
            f"array '{name}' from the server cannot be used: {fault}; server and site "
            "run different versions of fedsilo or other settings"
        )
    return ClassTargets(values, known) if known.any() else None


def class_sums(rows: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Add up ``rows`` (n, d) by label (n,): (classes, d), whole numbers as such, others float64."""
    kind = torch.int64 if rows.dtype == torch.int64 else torch.float64
    sums = torch.zeros(classes, rows.shape[1], dtype=kind)
    return sums.index_add_(0, labels, rows.to(kind))


def matching_loss(values: Tensor, labels: Tensor, targets: ClassTargets) -> Tensor:
    """Return the mean squared error between ``values`` (batch, d) and their labels' targets."""
    # A sample whose class has no target adds 0 but counts in the mean, so that the others in its
    # batch do not weigh more than in torch's mse_loss
    squares = (values.float() - targets.values[labels]).square().mean(dim=1)
    return (squares * targets.known[labels]).mean()
