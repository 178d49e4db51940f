"""FedProto (Tan et al. 2022): class prototypes, the pull towards them, and the nearest of them.

A site's prototype of a class is the mean embedding of its samples of that class (eq. 3), a global
one the mean of the sites' by their counts of the class (eq. 6). An embedding is all tokens of a
sample, flattened: (l * c,). On the wire: ``prototype/<class>``. A mean of few samples is nearly one
of them: ``large_classes`` says, at both ends of the wire, of which classes a mean leaves.

Equations (arXiv:2105.00243):
  (3) sums behind a site's prototypes -> models.methods.fedproto.class_sums
  (6) global prototypes -> strategies.methods.fedproto.FedProto.combine
  (7) distance to the prototypes -> models.methods.fedproto.matching_loss
  (inference) nearest prototype -> models.methods.fedproto.nearest_logits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from models.contract.errors import SiteError
from models.contract.settings_schema import setting
from models.networks.classifier import TokenClassifier
from models.networks.site_network import SiteNetwork

PROTOTYPE = "prototype/"


@dataclass(frozen=True)
class FedProtoSettings:
    """Settings of FedProto; with lambda 0 each site would be alone, which is ``local``."""

    group: ClassVar[str] = "fedproto"

    prototype_weight: float = setting(
        1.0, "weight lambda of the distance to the prototypes", above=0.0
    )
    inference: str = setting(
        "head",
        "what classifies where a model is measured: its head, or the nearest global prototype",
        choices=("head", "prototype"),
    )
    class_min_count: int = setting(
        10, "training samples behind a class mean; of a class with fewer none leaves", minimum=1
    )


@dataclass(frozen=True)
class ClassTargets:
    """A vector for each class that has one.

    Attributes:
        values: (classes, d) float32, 0 where there is none.
        known: (classes,) bool, which classes have one.
    """

    values: Tensor
    known: Tensor

    def to(self, device: torch.device) -> ClassTargets:
        """Return the same on ``device``."""
        return ClassTargets(self.values.to(device), self.known.to(device))


def large_classes(counts: Sequence[int], min_samples: int) -> dict[int, int]:
    """Return the classes of which a mean leaves a site: class to count of samples.

    Args:
        counts: the site's training samples by class.
        min_samples: samples that must be behind a mean, at least 1.
    """
    return {label: count for label, count in enumerate(counts) if count >= min_samples}


def class_targets(
    arrays: Mapping[str, Tensor], prefix: str, classes: int, size: int
) -> ClassTargets | None:
    """Return the targets among ``arrays``, named ``<prefix><class>``; None if there are none.

    Raises:
        SiteError: one is of no class, not (size,), or not finite.
    """
    values, known = torch.zeros(classes, size), torch.zeros(classes, dtype=torch.bool)
    names = {f"{prefix}{label}": label for label in range(classes)}
    for name, array in arrays.items():
        if name not in names:
            fault = f"there are {classes} classes, from 0"
        elif array.shape != (size,):
            fault = f"it is {tuple(array.shape)}, not ({size},)"
        elif not array.isfinite().all():
            fault = "it holds values that are not finite"
        else:
            values[names[name]], known[names[name]] = array, True
            continue
        raise SiteError(
            f"array '{name}' that came from the server cannot be used: {fault}; server and site "
            "run different versions of fedsilo or other settings"
        )
    return ClassTargets(values, known) if known.any() else None


def class_sums(rows: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the sum of ``rows`` (n, d) by label (n,): (classes, d) float64, in the rows' order."""
    sums = torch.zeros(classes, rows.shape[1], dtype=torch.float64)
    return sums.index_add_(0, labels, rows.double())


def matching_loss(values: Tensor, labels: Tensor, targets: ClassTargets) -> Tensor:
    """Return the mean squared error between ``values`` and the targets of their labels.

    The mean is over all elements of the batch (torch's ``mse_loss``); a sample whose class has no
    target counts in it with 0.

    Args:
        values: (batch, d).
        labels: (batch,) int64.
        targets: of d numbers a class, on the same device.
    """
    squares = (values.float() - targets.values[labels]).square().mean(dim=1)
    return (squares * targets.known[labels]).mean()


def nearest_logits(embeddings: Tensor, prototypes: ClassTargets) -> Tensor:
    """Return minus the squared distances to the prototypes, (batch, d) to (batch, classes).

    Their largest is the paper's prediction, the nearest prototype. A class without a prototype has
    minus infinity, and so probability 0.
    """
    wide = embeddings.float()
    distances = [(wide - prototype).square().sum(dim=1) for prototype in prototypes.values]
    return (-torch.stack(distances, dim=1)).masked_fill(~prototypes.known, -torch.inf)


class NearestPrototype(SiteNetwork):
    """A network that is measured by the nearest prototype in place of its head.

    Dropout is in the head, so that all Monte Carlo passes are the same here.
    """

    def __init__(self, network: TokenClassifier, prototypes: ClassTargets) -> None:
        super().__init__()
        self.network = network
        self.prototypes = prototypes

    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to tokens (batch, l, c)."""
        return self.network.encode(inputs)

    def classify(self, features: Tensor) -> Tensor:
        """Map tokens (batch, l, c) to ``nearest_logits`` (batch, classes)."""
        return nearest_logits(features.flatten(1), self.prototypes)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the network's own loss: prototypes classify at measuring, never in training."""
        return self.network.loss(inputs, labels)
