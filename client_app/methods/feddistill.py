"""FedDistill at a site: train near the others' mean logits, then send the mean logits of its own.

Of an evidential network the logits are log alpha, as everywhere here: their softmax are the
expected probabilities.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from torch import Tensor

from fedsilo.client_app.methods.local import LocalSite
from fedsilo.client_app.training.class_means import class_means
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.models.maths.class_means import class_targets, matching_loss
from fedsilo.models.methods.feddistill import LOGITS, FedDistillSettings
from fedsilo.models.networks.classifier import TokenClassifier
from fedsilo.models.networks.site_network import SiteNetwork


class FedDistillSite(LocalSite):
    """Keeps its network, as ``local`` does; only the mean logits of each class leave it."""

    settings: FedDistillSettings

    def local_training(self, network: SiteNetwork) -> LocalTraining:
        """Add to the network's loss the distance to the others' mean logits of the label."""
        training = super().local_training(network)
        classifier, classes = cast(TokenClassifier, network), self.silo.task.classes
        mean_logits = class_targets(self.came(), LOGITS, classes, classes)
        if mean_logits is None:
            return training
        weight, targets = self.settings.logit_weight, mean_logits.to(self.compute.device)

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            logits = classifier.classify(classifier.features(classifier.encode(inputs)))
            apart = matching_loss(logits, labels, targets)
            return classifier.criterion(logits, labels) + weight * apart

        return replace(training, objective=loss)

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the mean logits (classes,) of each class that has enough training samples."""
        means = class_means(
            network,
            self.silo,
            self.compute,
            lambda inputs: network.classify(network.features(network.encode(inputs))),
            max(self.settings.class_min_count, self.common.sums_min_count),
        )
        return {f"{LOGITS}{label}": mean for label, mean in means.items()}
