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

        The support model is a second model that never leaves the silo. If the server asks for
        metrics, the model of ``open`` is measured first.

        The main model starts from the silo's own model mixed with its neighbours' models, and the
        support model from its stored weights. Both are trained on the same batches. The loss is the
        main model's task loss plus the divergence between the models' outputs
        (``_divergence_loss``).

        In the silo's first round no support model is stored. The main model is then trained alone
        with its usual loss, and a copy of the result is stored as the support model.
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
        """Compute the main model's task loss plus the divergence between both models, for a batch.

        The divergence is beta * H(main, support) + (1 - beta) * H(support, main), where beta is
        'cdl.divergence-beta' and H compares the models' logits. The first term trains only the main
        model, and the second trains only the support model. The support model has no other loss.

        Args:
            batch: the inputs and labels. ``criterion`` computes the task's loss, and ``mean`` turns
                values per sample into the loss's form.
            main: the main model.
            support: the support model, which stays at the silo.

        Returns:
            The loss of the batch: a scalar for one site, or (batch,) for a stack of sites.
        """
        logits, beta = main(batch.inputs), self.settings.divergence_beta
        apart = contrastive_divergence(logits, support(batch.inputs), beta, batch.mean)
        return batch.criterion(logits, batch.labels) + apart
