"""CDL at a silo: a main model, mixed with the neighbours', and a support model that stays.

In the silo's first round there is only the main model, trained on the task; its result becomes the
support model (``support/<array>``). Later the task's loss and the divergence from the support model
train the mixed main model. The divergence from the main model trains the support model, with an
optimiser of the same settings that is new in each round.
"""

from typing import cast

from torch import Tensor

from fedsilo.client_app.methods.base import Lab, Outgoing, TokenClassifier
from fedsilo.client_app.methods.decentralised import DecentralisedSite, send_and_keep
from fedsilo.client_app.methods.moon import copy_network
from fedsilo.client_app.training.optimisers import open_optimiser
from fedsilo.client_app.training.terms import Batch, StackableLoss
from fedsilo.core.array_names import with_prefix
from fedsilo.models.methods.cdl import CDLSettings, contrastive_divergence
from fedsilo.models.networks.site_network import exchanged_arrays, load_exchanged

_SUPPORT = "support/"


class CDLSite(DecentralisedSite):
    """Mixes its model with the neighbours', trains it with a support model, and sends it."""

    settings: CDLSettings
    trains_stacked = True

    def train(self, lab: Lab) -> Outgoing:
        """Train the main and the support model together, send the main model, and store both.

        The main model starts from the silo's model mixed with its neighbours' models. The loss is
        the task's loss plus the divergence between both models. In the silo's first round only the
        main model is trained, and its copy becomes the support model.
        """
        network = cast(TokenClassifier, lab.open())
        lab.measure(network)
        load_exchanged(network, self._start(lab))
        stored = lab.state(_SUPPORT)
        if not stored:
            lab.fit(network)
            return send_and_keep(network, with_prefix(_SUPPORT, exchanged_arrays(network)))
        support = copy_network(network).train()
        load_exchanged(support, stored)
        beside = open_optimiser(support, lab.sampling)
        both = StackableLoss(self._divergence_loss, network, support)
        lab.fit(network, objective=both, beside=beside)
        return send_and_keep(network, with_prefix(_SUPPORT, exchanged_arrays(support)))

    def _divergence_loss(
        self, batch: Batch, main: TokenClassifier, support: TokenClassifier
    ) -> Tensor:
        """Compute the main model's task loss plus the divergence between both models.

        One term of the divergence trains only the main model, with the weight
        'cdl.divergence-beta'. The other trains only the support model. The result is a scalar, or
        (batch,) for stacked sites.
        """
        logits, beta = main(batch.inputs), self.settings.divergence_beta
        apart = contrastive_divergence(logits, support(batch.inputs), beta, batch.mean)
        return batch.criterion(logits, batch.labels) + apart
