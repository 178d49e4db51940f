"""FedPAC at a site: the classifier first, then the rest near the prototypes; class means leave."""

from typing import cast

import torch
from torch import Tensor

from fedsilo.client_app.methods.base import (
    Lab,
    Outgoing,
    SiteMethod,
    SiteNetwork,
    TokenClassifier,
    exchanged_arrays,
)
from fedsilo.client_app.methods.fedproto import prototype_loss
from fedsilo.client_app.methods.fedrep import FedRepSite
from fedsilo.client_app.training.loop import Objective
from fedsilo.client_app.training.site_class_means import class_means
from fedsilo.core.array_names import with_prefix
from fedsilo.models.methods.fedpac import RECEIVED, FedPACSettings
from fedsilo.models.methods.fedproto import PROTOTYPE


class FedPACSite(FedRepSite):
    """Receives the shared arrays and its own mix of classifiers, and keeps nothing."""

    settings: FedPACSettings
    trains_stacked = True

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the network from the received arrays only; the server has all of them."""
        return SiteMethod.open(self, lab)

    def train(self, lab: Lab) -> Outgoing:
        """Train the network, and send it with class means from before and after the training.

        ``received/<class>`` (d + 1,) has the received network's mean embedding and the embeddings'
        mean squared length. ``prototype/<class>`` (d,) is the trained network's mean embedding. A
        class with too few training samples has no means. The received network is measured first, if
        metrics are requested.
        """
        network = cast(TokenClassifier, lab.open())
        lab.measure(network)
        # All sites received the same encoder, so the server can compare its statistics
        before = self._class_means(lab, network)
        self.fit(lab, network)
        after = self._class_means(lab, network)
        sent = exchanged_arrays(network) | with_prefix(RECEIVED, before)
        return Outgoing(
            network, send=sent | {f"{PROTOTYPE}{label}": a[:-1] for label, a in after.items()}
        )

    def body_objective(self, lab: Lab, network: SiteNetwork) -> Objective | None:
        """Build the loss that trains all layers but the classifier: the usual loss plus a distance.

        The distance (eq. 4) is the mean squared difference between a sample's embedding and the
        received mean of its class, times 'fedpac.alignment-weight'. If no means were received, the
        result is None.
        """
        classifier = cast(TokenClassifier, network)
        prototypes = with_prefix(PROTOTYPE, lab.arrays(PROTOTYPE))
        return prototype_loss(lab, classifier, prototypes, self.settings.alignment_weight)

    def _class_means(self, lab: Lab, network: TokenClassifier) -> dict[str, Tensor]:
        """Return each class's mean embedding and then its mean squared length: (d + 1,) by class.

        The means are over training samples. Classes with fewer than 'fedpac.class-min-count' or
        'privacy.sums-min-count' samples are left out.
        """

        def rows(inputs: Tensor) -> Tensor:
            found = network.encode(inputs).flatten(1)
            return torch.cat([found, found.square().sum(dim=1, keepdim=True)], dim=1)

        least = max(self.settings.class_min_count, lab.common.sums_min_count)
        means = class_means(network, lab.silo, lab.compute, rows, least)
        return {str(label): mean for label, mean in means.items()}
