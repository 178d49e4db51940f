"""FedProto at a site: train near the global prototypes, then send the prototypes of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from client_app.methods.local import LocalSite
from client_app.training.compute import Compute
from client_app.training.evaluation import Watch, in_batches
from client_app.training.loop import Objective
from datasets.silo.silos import Split
from models.methods.fedproto import (
    PROTOTYPE,
    ClassTargets,
    FedProtoSettings,
    NearestPrototype,
    class_sums,
    class_targets,
    large_classes,
    matching_loss,
)
from models.networks.classifier import TokenClassifier
from models.networks.encoders import float_inputs
from models.networks.site_network import SiteNetwork


class FedProtoSite(LocalSite):
    """Keeps its network, as ``local`` does; only prototypes leave it.

    With ``inference`` 'prototype' a model is measured by the global prototypes that came, those of
    the round before; where none came, as in round 1, by its head.
    """

    settings_class = FedProtoSettings
    settings: FedProtoSettings

    def objective(self, network: SiteNetwork) -> Objective:
        """Return the network's loss plus the distance to the labels' prototypes (eq. 7)."""
        own = cast(TokenClassifier, network)
        prototypes = self._prototypes(own)
        if prototypes is None:
            return own.loss
        weight = self.settings.prototype_weight

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            tokens = own.encode(inputs)
            task = own.criterion(own.classify(own.features(tokens)), labels)
            return task + weight * matching_loss(tokens.flatten(1), labels, prototypes)

        return loss

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the prototype (l * c,) of each class that has enough training samples."""
        means = class_means(
            network,
            self.silo.train,
            self.silo.task.classes,
            self.compute,
            lambda inputs: network.encode(inputs).flatten(1),
            max(self.settings.class_min_count, self.common.sums_min_count),
        )
        return {f"{PROTOTYPE}{label}": mean for label, mean in means.items()}

    def measured(
        self, network: SiteNetwork, model: str, splits: tuple[str, ...]
    ) -> dict[str, float]:
        """Measure by the nearest prototype where that is wanted and there is one."""
        own = cast(TokenClassifier, network)
        by_prototype = self.settings.inference == "prototype"
        prototypes = self._prototypes(own) if by_prototype else None
        if prototypes is None:
            return super().measured(network, model, splits)
        return super().measured(NearestPrototype(own, prototypes), model, splits)

    def watch(self, network: SiteNetwork, split: str) -> Watch | None:
        """Watch nothing where prototypes answer: distances are no evidence, whatever the head."""
        if isinstance(network, NearestPrototype):
            return None
        return super().watch(network, split)

    def _prototypes(self, network: TokenClassifier) -> ClassTargets | None:
        """Return the global prototypes that came, None if none did."""
        size, classes = network.tokens * network.channels, self.silo.task.classes
        found = class_targets(self.request.arrays(), PROTOTYPE, classes, size)
        return found and found.to(self.compute.device)


def class_means(
    network: SiteNetwork,
    split: Split,
    classes: int,
    compute: Compute,
    function: Callable[[Tensor], Tensor],
    least: int,
) -> dict[int, Tensor]:
    """Return the mean of ``function`` over the samples of each class that has enough of them.

    The network is put in eval mode: in training mode batch norm and dropout would make a sample's
    values depend on its batch and on chance. Batch by batch, so that no split's embeddings are ever
    held at once; sums are float64 in the order of the samples.

    Args:
        network: placed on the compute device.
        split: inputs and labels.
        classes: how many classes there are.
        compute: device and precision.
        function: maps inputs (batch, ...) to rows (batch, d).
        least: samples that must be behind a mean.

    Returns:
        Class to mean (d,), float32 on the CPU.
    """
    counts = torch.bincount(split.labels, minlength=classes).tolist()
    large = large_classes(counts, least)
    if not large:
        return {}
    cast(nn.Module, network).eval()
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
