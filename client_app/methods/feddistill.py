"""FedDistill at a site: train near the others' mean logits, then send its own mean logits.

The logits of an evidential network are log alpha, as everywhere in fedsilo, so their softmax gives
the expected probabilities.
"""

from typing import cast

from torch import Tensor

from fedsilo.client_app.methods.base import Lab, Outgoing, TokenClassifier
from fedsilo.client_app.methods.local import LocalSite, from_others, send_class_means
from fedsilo.client_app.training.terms import Batch, StackableLoss
from fedsilo.models.maths.class_means import ClassTargets, class_targets, matching_loss
from fedsilo.models.methods.feddistill import LOGITS, FedDistillSettings


class FedDistillSite(LocalSite):
    """Stores its network like ``local``; only the mean logits of each class leave."""

    settings: FedDistillSettings
    trains_stacked = True
    # ``fit`` trains the stored network with noise, because the means that leave depend on it
    measures_what_stays = False

    def train(self, lab: Lab) -> Outgoing:
        """Train near the other sites' mean logits, then send this site's mean logits of each class.

        In round 1 no mean logits are received, and the usual loss is used. A class with too few
        training samples is not sent ('feddistill.class-min-count', 'privacy.sums-min-count'). The
        network stays at the site. If the server asks for metrics, it is measured first.
        """
        network = cast(TokenClassifier, lab.open())
        lab.measure(network)
        lab.fit(network, objective=self._logit_loss(lab, network))
        return send_class_means(lab, network, LOGITS, network, self.settings.class_min_count)

    def _logit_loss(self, lab: Lab, network: TokenClassifier) -> StackableLoss | None:
        """Build the loss: the network's own loss plus a distance from the received mean logits.

        The distance is the mean squared difference to the mean logits of a sample's label, times
        'feddistill.logit-weight'. Without received mean logits the result is None.
        """
        classes = lab.silo.shape.outputs
        mean_logits = class_targets(from_others(lab), LOGITS, classes, classes)
        if mean_logits is None:
            return None
        weight = self.settings.logit_weight

        def loss(batch: Batch, network: TokenClassifier, targets: ClassTargets) -> Tensor:
            logits = network(batch.inputs)
            apart = matching_loss(logits, batch.labels, targets, batch.mean)
            return batch.criterion(logits, batch.labels) + weight * apart

        return StackableLoss(loss, network, mean_logits.to(lab.compute.device))
