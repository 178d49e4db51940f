"""MOON at a site: train near the global model's representations, away from its own last model's.

The site keeps its model, head included, under ``previous/``. In the first round that it takes part
in there is none and the term is left out, as in the authors' code; with the global model in its
place the term would be a constant, log 2, without a gradient.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fedsilo.client_app.methods.fedavg import FedAvgSite
from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.models.contract.messages import EVALUATE
from fedsilo.models.methods.moon import (
    PROJECTION,
    MoonSettings,
    build_projection,
    contrastive_loss,
)
from fedsilo.models.networks.classifier import TokenClassifier
from fedsilo.models.networks.exchanged import FrozenPart, exchanged_arrays, load_exchanged
from fedsilo.models.networks.site_network import SiteNetwork

_PREVIOUS, _HEAD = "previous/", "projection."  # as the network's own arrays name the head


class MoonSite(FedAvgSite):
    """Receives and returns the network and, to train, the projection head."""

    settings: MoonSettings

    def open_network(self) -> SiteNetwork:
        """Build the network with the global weights, the head a part of it except to evaluate."""
        network = initial_classifier(self.common, self.silo)
        if self.request.instruction.phase != EVALUATE:
            head = build_projection(self.common.seed, network.channels, self.settings)
            network.add_module("projection", head)
        load_exchanged(network, _from_wire(self.request.arrays()))
        return self.compute.place(network)

    def local_training(self, network: SiteNetwork) -> LocalTraining:
        """Add to the network's loss mu times the model-contrastive loss (eq. 4).

        The global model is what ``network`` is now.
        """
        training = super().local_training(network)
        classifier = cast(TokenClassifier, network)
        stored = self.own_state(_PREVIOUS)
        if not stored:
            return training
        incoming, previous = (twin(classifier).eval().requires_grad_(False) for _ in range(2))
        load_exchanged(previous, stored)
        mu, temperature = self.settings.contrast_mu, self.settings.contrast_temperature

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            tokens = classifier.encode(inputs)
            task = classifier.criterion(classifier.classify(classifier.features(tokens)), labels)
            with torch.no_grad():
                near, far = (_represented(net, net.encode(inputs)) for net in (incoming, previous))
            representations = _represented(classifier, tokens)
            return task + mu * contrastive_loss(representations, near, far, temperature)

        return replace(training, objective=loss)

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return all trained weights, the head's among them."""
        return _to_wire(exchanged_arrays(network))

    def kept(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the trained model, from which the next round keeps away."""
        arrays = exchanged_arrays(network)
        return {f"{_PREVIOUS}{name}": array for name, array in arrays.items()}


def twin(network: TokenClassifier) -> TokenClassifier:
    """Return a copy; what is frozen for good, a ViT's backbone, it has in common with it."""
    frozen: dict[int, object] = {
        id(part): part for part in network.modules() if isinstance(part, FrozenPart)
    }
    return copy.deepcopy(network, frozen)


def _represented(network: TokenClassifier, tokens: Tensor) -> Tensor:
    """Return the representations (batch, size) of tokens that ``network`` encoded."""
    representations: Tensor = network.get_submodule("projection")(tokens)
    return representations


def _to_wire(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    return {_renamed(name, _HEAD, PROJECTION): array for name, array in arrays.items()}


def _from_wire(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    return {_renamed(name, PROJECTION, _HEAD): array for name, array in arrays.items()}


def _renamed(name: str, before: str, after: str) -> str:
    return f"{after}{name.removeprefix(before)}" if name.startswith(before) else name
