"""DisTrans at a site: train the network of two channels and, by SGD of its own, the offset.

With ``offset-aggregation`` "none" the offset is the site's own state (``offset.weight``), drawn at
first from what the site draws from, and neither comes nor leaves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedsilo.client_app.methods.fedavg import FedAvgSite
from fedsilo.client_app.training.eager_optimisers import eager
from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.client_app.training.loop import LocalTraining, decayed_rates
from fedsilo.models.methods.distrans import (
    OFFSET,
    OFFSETS,
    DisTransSettings,
    DoubleChannelClassifier,
    double_channels,
)
from fedsilo.models.networks.exchanged import exchanged_arrays, load_exchanged
from fedsilo.models.networks.site_network import SiteNetwork


class DisTransSite(FedAvgSite):
    """Receives and returns the network and, unless it stays, the offset."""

    settings: DisTransSettings

    def open_network(self) -> SiteNetwork:
        """Build the network with the global weights and the site's offset."""
        single = initial_classifier(self.common, self.silo)
        shape = self.silo.task.input_shape
        network = double_channels(single, self.drawing, self.settings, shape, self.silo.name)
        load_exchanged(network, self._arrays(network))
        return self.compute.place(network)

    def local_training(self, network: SiteNetwork) -> LocalTraining:
        """Train the offset too: after each step of the network, by the gradient of the same batch.

        The authors' code takes both steps by one gradient as well.
        """
        training = super().local_training(network)
        offset = cast(DoubleChannelClassifier, network).apart_parameters()
        optimiser = eager(torch.optim.SGD)(offset, lr=self.settings.offset_learning_rate)
        set_rates = decayed_rates(optimiser, training.settings, training.steps_before)

        def step(inputs: Tensor, _: Optimizer) -> None:
            set_rates()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

        return replace(training, after_step=step)

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return all trained weights, the offset unless it stays."""
        arrays = exchanged_arrays(network)
        return {n: array for n, array in arrays.items() if not (self._stays() and n == OFFSET)}

    def kept(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the offset, if it stays."""
        return {OFFSET: exchanged_arrays(network)[OFFSET]} if self._stays() else {}

    def _stays(self) -> bool:
        return self.settings.offset_aggregation == "none"

    def _arrays(self, network: DoubleChannelClassifier) -> dict[str, Tensor]:
        """Return what came, with the site's own offset among it."""
        arrays = self.request.arrays()
        if self._stays():
            return arrays | {OFFSET: network.offset.weight.detach()} | self.own_state()
        own = arrays.get(f"{OFFSETS}{self.silo.name}")  # in a finished run's model, if anywhere
        named = {n: array for n, array in arrays.items() if not n.startswith(OFFSETS)}
        return named if own is None else named | {OFFSET: own}
