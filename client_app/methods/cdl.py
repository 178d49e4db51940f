"""CDL at a silo: a main model, mixed with the neighbours', and a support model that stays.

In the silo's first round there is only the main model, trained by the task; its result becomes the
support model (``support/<array>``). Later the task's loss and the divergence from the support model
train the mixed main model. The divergence from the main model trains the support model, by an
optimiser with the same settings that is new in each round.
"""

from typing import cast

from torch import Tensor

from fedsilo.client_app.methods.base import Lab, Outgoing, TokenClassifier
from fedsilo.client_app.methods.decentralised import DecentralisedSite, send_and_keep
from fedsilo.client_app.methods.moon import copy_network
from fedsilo.client_app.training.loop import Objective
from fedsilo.client_app.training.optimisers import open_optimiser
from fedsilo.core.array_names import with_prefix
from fedsilo.models.methods.cdl import CDLSettings, contrastive_divergence
from fedsilo.models.networks.site_network import exchanged_arrays, load_exchanged

_SUPPORT = "support/"


class CDLSite(DecentralisedSite):
    """Mixes, trains two models, and sends the main one."""

    settings: CDLSettings

    def train(self, lab: Lab) -> Outgoing:
        """Train the main model and the support model towards each other."""
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
        lab.fit(network, objective=self._apart(network, support), beside=beside)
        return send_and_keep(network, with_prefix(_SUPPORT, exchanged_arrays(support)))

    def _apart(self, main: TokenClassifier, support: TokenClassifier) -> Objective:
        """Return the main model's loss plus the divergence, whose gradients train both models."""

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            logits = main(inputs)
            apart = contrastive_divergence(logits, support(inputs), self.settings.divergence_beta)
            return main.criterion(logits, labels) + apart

        return loss
