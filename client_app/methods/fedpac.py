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

        The received network is measured first, if the server asks for metrics. The site sends the
        trained network and these means over its training samples:

        - ``received/<class>`` (d + 1,), computed with the received network: the class's mean
          embedding, followed by the mean of the embeddings' squared lengths.
        - ``prototype/<class>`` (d,), computed with the trained network: the class's mean embedding.

        A class with too few training samples has no means (``_class_means``). The site stores no
        arrays.
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

        A prototype is the global mean embedding of a class, which the server sent. The distance
        (eq. 4) is the mean squared difference between a sample's embedding and the prototype of its
        label, times 'fedpac.alignment-weight'. If no prototypes were received, the result is None,
        and the usual loss is used.
        """
        classifier = cast(TokenClassifier, network)
        prototypes = with_prefix(PROTOTYPE, lab.arrays(PROTOTYPE))
        return prototype_loss(lab, classifier, prototypes, self.settings.alignment_weight)

    def _class_means(self, lab: Lab, network: TokenClassifier) -> dict[str, Tensor]:
        """Return each class's mean embedding, and the mean of its embeddings' squared lengths.

        The means are over this site's training samples. Classes with fewer samples than
        'fedpac.class-min-count' or 'privacy.sums-min-count' are left out.

        Returns:
            The class's number as text -> (d + 1,) float32: the d values of the mean embedding, then
            the mean squared length.
        """

        def rows(inputs: Tensor) -> Tensor:
            found = network.encode(inputs).flatten(1)
            return torch.cat([found, found.square().sum(dim=1, keepdim=True)], dim=1)

        least = max(self.settings.class_min_count, lab.common.sums_min_count)
        means = class_means(network, lab.silo, lab.compute, rows, least)
        return {str(label): mean for label, mean in means.items()}
