"""CDL at a silo: a main model that is mixed with the neighbours', a support model that stays.

In the silo's first round there is the main model alone, trained by the task; the support model
starts as what that round made of it (``support/<array>``). From then on the task's loss and the
divergence from the support model train the mixed main model, and its divergence from the main model
trains the support model, by the same optimiser and rates, afresh each round.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from torch import Tensor
from torch.optim import Optimizer

from fedsilo.client_app.methods.decentralised import DecentralisedSite
from fedsilo.client_app.methods.moon import twin
from fedsilo.client_app.training.loop import LocalTraining, decayed_rates, open_optimiser
from fedsilo.models.methods.cdl import CDLSettings, contrastive_divergence
from fedsilo.models.networks.classifier import TokenClassifier
from fedsilo.models.networks.exchanged import exchanged_arrays, load_exchanged
from fedsilo.models.networks.site_network import SiteNetwork

_SUPPORT = "support/"


class CDLSite(DecentralisedSite):
    """Mixes, trains two models, sends the main one."""

    settings: CDLSettings
    _support: TokenClassifier | None = None

    def local_training(self, network: SiteNetwork) -> LocalTraining:
        """Train by the main model's loss plus the contrastive divergence, if there is a support.

        The support model's step is by the gradients of the same batch.
        """
        training = super().local_training(network)
        main, support = cast(TokenClassifier, network), self._opened(network)
        if support is None:
            return training
        support_optimiser = open_optimiser(support, training.settings)
        set_rates = decayed_rates(support_optimiser, training.settings, training.steps_before)

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            logits = main(inputs)
            apart = contrastive_divergence(logits, support(inputs), self.settings.divergence_beta)
            return main.criterion(logits, labels) + apart

        def step(inputs: Tensor, optimiser: Optimizer) -> None:
            set_rates()
            support_optimiser.step()
            support_optimiser.zero_grad(set_to_none=True)

        return replace(training, objective=loss, after_step=step)

    def kept(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the main model and the support model."""
        support = exchanged_arrays(self._support or network)
        return super().kept(network) | {f"{_SUPPORT}{n}": array for n, array in support.items()}

    def _opened(self, network: SiteNetwork) -> TokenClassifier | None:
        """Return the support model as it was left, in training mode; None in the first round."""
        stored = self.own_state(_SUPPORT)
        if self._support is None and stored:
            self._support = twin(cast(TokenClassifier, network)).train()
            load_exchanged(self._support, stored)
        return self._support
