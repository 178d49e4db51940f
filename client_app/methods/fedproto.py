"""FedProto at a site: train near the global prototypes, then send the prototypes of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from torch import Tensor

from fedsilo.client_app.methods.base import MeasuredModel
from fedsilo.client_app.methods.local import LocalSite
from fedsilo.client_app.training.class_means import class_means
from fedsilo.client_app.training.evaluation import Probe
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.models.maths.class_means import ClassTargets, class_targets, matching_loss
from fedsilo.models.methods.fedproto import PROTOTYPE, FedProtoSettings, NearestPrototype
from fedsilo.models.networks.classifier import TokenClassifier
from fedsilo.models.networks.site_network import SiteNetwork


class FedProtoSite(LocalSite):
    """Keeps its network, as ``local`` does; only prototypes leave it.

    With ``inference`` 'prototype' a model is measured by the global prototypes that came, those of
    the round before; where none came, as in round 1, by its head.
    """

    settings: FedProtoSettings

    def local_training(self, network: SiteNetwork) -> LocalTraining:
        """Add to the network's loss the distance to the labels' prototypes (eq. 7)."""
        training = super().local_training(network)
        classifier = cast(TokenClassifier, network)
        prototypes = self._prototypes(classifier)
        if prototypes is None:
            return training
        weight = self.settings.prototype_weight

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            tokens = classifier.encode(inputs)
            task = classifier.criterion(classifier.classify(classifier.features(tokens)), labels)
            return task + weight * matching_loss(tokens.flatten(1), labels, prototypes)

        return replace(training, objective=loss)

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the prototype (l * c,) of each class that has enough training samples."""
        means = class_means(
            network,
            self.silo,
            self.compute,
            lambda inputs: network.encode(inputs).flatten(1),
            max(self.settings.class_min_count, self.common.sums_min_count),
        )
        return {f"{PROTOTYPE}{label}": mean for label, mean in means.items()}

    def measured(self, network: SiteNetwork) -> Iterator[MeasuredModel]:
        """Yield the nearest prototype's answers where they are wanted and there is one."""
        classifier = cast(TokenClassifier, network)
        by_prototype = self.settings.inference == "prototype"
        prototypes = self._prototypes(classifier) if by_prototype else None
        yield MeasuredModel(
            network if prototypes is None else NearestPrototype(classifier, prototypes)
        )

    def probe(self, network: SiteNetwork, split: str) -> Probe | None:
        """Probe nothing where prototypes answer: distances are no evidence, whatever the head."""
        if isinstance(network, NearestPrototype):
            return None
        return super().probe(network, split)

    def sample_figures(self, network: SiteNetwork, tokens: Tensor) -> dict[str, Tensor]:
        """Return nothing where prototypes answer."""
        if isinstance(network, NearestPrototype):
            return {}
        return super().sample_figures(network, tokens)

    def _prototypes(self, network: TokenClassifier) -> ClassTargets | None:
        """Return the global prototypes that came, None if none did."""
        size, classes = network.tokens * network.channels, self.silo.task.classes
        prototypes = class_targets(self.came(), PROTOTYPE, classes, size)
        return prototypes and prototypes.to(self.compute.device)
