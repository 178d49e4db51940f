"""FedProto at a site: train near the global prototypes, then send the prototypes of its own."""

from collections.abc import Iterable
from typing import cast

from torch import Tensor

from fedsilo.client_app.methods.base import Answer, Lab, Measured, SiteNetwork, TokenClassifier
from fedsilo.client_app.methods.local import LocalSite, from_others
from fedsilo.client_app.training.class_means import class_means
from fedsilo.client_app.training.loop import Objective
from fedsilo.models.contract.array_names import with_prefix
from fedsilo.models.maths.class_means import ClassTargets, class_targets, matching_loss
from fedsilo.models.methods.fedproto import PROTOTYPE, FedProtoSettings, NearestPrototype
from fedsilo.models.networks.exchanged import exchanged_arrays


class FedProtoSite(LocalSite):
    """Keeps its network, as ``local`` does; only prototypes leave it.

    With ``inference`` 'prototype' a model is measured by the global prototypes received, those of
    the round before; where none came, as in round 1, by its head.
    """

    settings: FedProtoSettings
    measures_what_stays = False  # what it keeps is trained as what it sends is

    def train(self, lab: Lab) -> Answer:
        """Train near the global prototypes, and send the prototype (l * c,) of each class."""
        network = cast(TokenClassifier, lab.open())
        lab.measure(network)
        lab.fit(network, objective=self._near_prototypes(lab, network))
        means = class_means(
            network,
            lab.silo,
            lab.compute,
            lambda inputs: network.encode(inputs).flatten(1),
            max(self.settings.class_min_count, lab.common.sums_min_count),
            lab.privacy.means(),
        )
        return lab.reply(
            network,
            send=with_prefix(PROTOTYPE, {str(label): mean for label, mean in means.items()}),
            keep=exchanged_arrays(network),
        )

    def measured(self, lab: Lab, network: SiteNetwork) -> Iterable[Measured]:
        """Yield the nearest prototype's answers where they are wanted and there is one.

        Distances are not evidence, whatever the head is.
        """
        if self.settings.inference == "prototype":
            classifier = cast(TokenClassifier, network)
            if (prototypes := _prototypes(lab, classifier)) is not None:
                return [Measured(NearestPrototype(classifier, prototypes))]
        return super().measured(lab, network)

    def _near_prototypes(self, lab: Lab, network: TokenClassifier) -> Objective | None:
        """Return the network's loss plus the distance to the label's prototype (eq. 7)."""
        prototypes, weight = _prototypes(lab, network), self.settings.prototype_weight
        if prototypes is None:
            return None

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            tokens = network.encode(inputs)
            task = network.criterion(network.classify(network.features(tokens)), labels)
            return task + weight * matching_loss(tokens.flatten(1), labels, prototypes)

        return loss


def _prototypes(lab: Lab, network: TokenClassifier) -> ClassTargets | None:
    """Return the global prototypes received, or None."""
    size, classes = network.tokens * network.channels, lab.silo.task.classes
    prototypes = class_targets(from_others(lab), PROTOTYPE, classes, size)
    return prototypes and prototypes.to(lab.compute.device)
