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
        """Train with a pull to other sites' mean logits, and send this site's mean logits by class.

        The site's own network is measured first, if the server asks for metrics. For each sample, a
        penalty (``_logit_loss``) grows with the distance of its logits from the mean logits that
        were received for its class. In round 1 none are received, and there is no penalty.

        After the training, the logits of this site's training samples are averaged by class. A
        class is left out if it has fewer samples than 'feddistill.class-min-count' or
        'privacy.sums-min-count'. The network itself is stored and does not leave.
        """
        network = cast(TokenClassifier, lab.open())
        lab.measure(network)
        lab.fit(network, objective=self._logit_loss(lab, network))
        return send_class_means(lab, network, LOGITS, network, self.settings.class_min_count)

    def _logit_loss(self, lab: Lab, network: TokenClassifier) -> StackableLoss | None:
        """Build the loss: the network's own loss plus a distance from the received mean logits.

        For each sample, the distance is the mean squared difference between its logits and the
        received mean logits of its label. A label without mean logits gives 0. The mean over the
        batch is multiplied by 'feddistill.logit-weight' and added to the network's own loss.

        Returns:
            The loss; None if no mean logits were received, as in round 1. The network's own loss is
            then used.

        Raises:
            SiteError: a received array has an unknown class or another shape, or is not finite.
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
