"""FedProto at a site: train near the global prototypes, then send its own prototypes."""

from collections.abc import Iterable
from typing import cast

from torch import Tensor

from fedsilo.client_app.methods.base import Lab, Measured, Outgoing, SiteNetwork, TokenClassifier
from fedsilo.client_app.methods.local import LocalSite, from_others, send_class_means
from fedsilo.client_app.training.terms import Batch, StackableLoss
from fedsilo.models.maths.class_means import ClassTargets, class_targets, matching_loss
from fedsilo.models.methods.fedproto import PROTOTYPE, FedProtoSettings, NearestPrototype


class FedProtoSite(LocalSite):
    """Stores its network like ``local``; only prototypes leave.

    If ``inference`` is 'prototype', the model is measured with the received global prototypes,
    which come from the round before. Without any, as in round 1, it is measured with its
    head.
    """

    settings: FedProtoSettings
    trains_stacked = True
    # ``fit`` trains the stored network with noise, because the means that leave depend on it
    measures_what_stays = False

    def train(self, lab: Lab) -> Outgoing:
        """Train near the global prototypes, then send this site's prototype of each class.

        A site's prototype of a class is the mean of the network's flattened tokens (the encoder's
        outputs) over the class's training samples. During the training the received global
        prototypes attract the tokens (``prototype_loss``). A class with fewer training samples than
        'fedproto.class-min-count' or 'privacy.sums-min-count' has no prototype. The network is
        measured first, if the server asks for metrics. It is stored at the site and not sent.
        """
        network = cast(TokenClassifier, lab.open())
        lab.measure(network)
        weight = self.settings.prototype_weight
        lab.fit(network, objective=prototype_loss(lab, network, from_others(lab), weight))

        def embeddings(inputs: Tensor) -> Tensor:
            return network.encode(inputs).flatten(1)

        return send_class_means(lab, network, PROTOTYPE, embeddings, self.settings.class_min_count)

    def measured(self, lab: Lab, network: SiteNetwork) -> Iterable[Measured]:
        """Return the network to measure: a nearest-prototype classifier or ``network`` itself.

        If 'fedproto.inference' is "prototype" and prototypes were received, a sample gets the class
        of the nearest received prototype. Such a classifier reports no metrics of evidence, because
        it computes only distances. In any other case the result is that of ``SiteMethod.measured``.
        """
        if self.settings.inference == "prototype":
            classifier = cast(TokenClassifier, network)
            if (prototypes := _prototypes(lab, classifier, from_others(lab))) is not None:
                return [Measured(NearestPrototype(classifier, prototypes))]
        return super().measured(lab, network)


def prototype_loss(
    lab: Lab, network: TokenClassifier, arrays: dict[str, Tensor], weight: float
) -> StackableLoss | None:
    """Build a loss function: the network's own loss plus a distance to prototypes (eq. 7).

    A prototype is the mean of a class's flattened tokens (the encoder's outputs) over all sites.
    The distance is the mean squared error between a sample's flattened tokens and the prototype of
    its label. If the label has no prototype, it is 0.

    Args:
        lab: the lab of the message.
        network: the network to train.
        arrays: the received prototypes, by name.
        weight: the factor of the distance.

    Returns:
        The loss. None if ``arrays`` is empty, as in round 1, and the network's own loss is then
        used.

    Raises:
        SiteError: an array is not named after a known class, has another shape, or is not finite.
    """
    prototypes = _prototypes(lab, network, arrays)
    if prototypes is None:
        return None

    def loss(batch: Batch, network: TokenClassifier, prototypes: ClassTargets) -> Tensor:
        tokens = network.encode(batch.inputs)
        task = batch.criterion(network.classify(network.features(tokens)), batch.labels)
        apart = matching_loss(tokens.flatten(1), batch.labels, prototypes, batch.mean)
        return task + weight * apart

    return StackableLoss(loss, network, prototypes)


def _prototypes(
    lab: Lab, network: TokenClassifier, arrays: dict[str, Tensor]
) -> ClassTargets | None:
    """Return the received prototype of each class on the compute device; None without any array.

    A prototype is the mean of a class's tokens (the encoder's outputs), flattened to (tokens *
    channels,). The result says which classes have one.

    Raises:
        SiteError: an array is not named after a known class, has another shape, or is not finite.
    """
    size, classes = network.tokens * network.channels, lab.silo.shape.outputs
    prototypes = class_targets(arrays, PROTOTYPE, classes, size)
    return prototypes and prototypes.to(lab.compute.device)
