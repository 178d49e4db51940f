"""MOON at a site: train near the global model's representations and away from its own last ones.

The site stores its model, including the projection head, under ``previous/``. In the site's first
round there is no previous model and the contrastive term is left out, as in the authors' code. With
the global model in its place the term would be a constant, log 2, without a gradient.
"""

import copy
from typing import cast

import torch
from torch import Tensor

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, SiteNetwork, TokenClassifier
from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.client_app.training.terms import Batch, StackableLoss
from fedsilo.core.array_names import arrays_below, with_prefix
from fedsilo.core.messages import EVALUATE
from fedsilo.models.methods.moon import PROJECTION, MoonSettings, build_projection, contrastive_loss
from fedsilo.models.networks.site_network import FrozenPart, exchanged_arrays, load_exchanged

_PREVIOUS, _HEAD = "previous/", "projection."  # prefixes: of the stored model, of the head's arrays


class MoonSite(SiteMethod):
    """Receives and returns the network and, for training, the projection head."""

    settings: MoonSettings
    trains_stacked = True

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the network with the received weights, on the compute device.

        In every phase but the final evaluation, the network also gets MOON's projection head, with
        its received weights. The head maps the encoder's outputs to the representations that the
        contrastive loss compares.

        Raises:
            SettingError: the arrays do not fit the network.
        """
        network = initial_classifier(lab.common, lab.silo, lab.task)
        if lab.instruction.phase != EVALUATE:
            head = build_projection(lab.common.seed, network.channels)
            network.add_module("projection", head)
        load_exchanged(network, _rename(lab.arrays(), PROJECTION, _HEAD))
        return lab.compute.place(network)

    def train(self, lab: Lab) -> Outgoing:
        """Train towards the global model's representations, and away from the previous model's.

        Representations are the outputs of the projection head. The previous model is the one that
        this site trained and stored in its last round. In the site's first round there is none, and
        only the task's loss is used. The trained network and its head are sent to the server, and a
        copy of both is stored as the next round's previous model.
        """
        network = cast(TokenClassifier, lab.open())
        lab.measure(network)
        lab.fit(network, objective=self._contrastive_objective(network, lab.state(_PREVIOUS)))
        arrays = exchanged_arrays(network)
        return Outgoing(
            network, send=_rename(arrays, _HEAD, PROJECTION), keep=with_prefix(_PREVIOUS, arrays)
        )

    def _contrastive_objective(
        self, network: TokenClassifier, stored: dict[str, Tensor]
    ) -> StackableLoss | None:
        """Build MOON's loss: the task's loss plus mu times the model-contrastive loss (eq. 4).

        The contrastive loss pulls the network's representations (the projection head's outputs)
        towards those of the global model, and pushes them away from those of the site's previous
        model. Both models are fixed copies. mu is 'moon.contrast-mu', and the temperature is
        'moon.contrast-temperature'.

        Args:
            network: the network to train. A frozen copy of its present state is the global model.
            stored: the arrays of the site's previous model; empty in the site's first round.

        Returns:
            The loss, or None if ``stored`` is empty. The network is then trained with the task's
            loss alone.
        """
        if not stored:
            return None
        incoming = copy_network(network).eval().requires_grad_(False)
        previous = copy_network(network).eval().requires_grad_(False)
        load_exchanged(previous, stored)
        return StackableLoss(self._contrastive_loss, network, incoming, previous)

    def _contrastive_loss(
        self,
        batch: Batch,
        network: TokenClassifier,
        incoming: TokenClassifier,
        previous: TokenClassifier,
    ) -> Tensor:
        """Compute a batch's loss (eq. 4): the task's loss plus mu times the contrastive loss.

        mu is 'moon.contrast-mu'. The fixed models get no gradients.

        Args:
            batch: the inputs and labels. ``criterion`` computes the task's loss, and ``mean`` turns
                values per sample into the loss's form.
            network: the network in training.
            incoming: the fixed global model, which attracts the representations.
            previous: the site's fixed previous model, which repels them.
        """
        tokens = network.encode(batch.inputs)
        task = batch.criterion(network.classify(network.features(tokens)), batch.labels)
        # Both anchors are fixed networks, so only the trained one needs gradients
        with torch.no_grad():
            near = _represent(incoming, incoming.encode(batch.inputs))
            far = _represent(previous, previous.encode(batch.inputs))
        own, temperature = _represent(network, tokens), self.settings.contrast_temperature
        contrast = contrastive_loss(own, near, far, temperature, batch.mean)
        return task + self.settings.contrast_mu * contrast


def copy_network(network: TokenClassifier) -> TokenClassifier:
    """Return a deep copy of a network, which shares only frozen parts, such as a backbone.

    Shared are the parts of the class ``FrozenPart``, which are never trained. Any other part is
    copied, even if its parameters have no gradients.
    """
    # Deepcopy does not copy an object that is in its memo
    frozen: dict[int, object] = {}
    for part in network.modules():
        if isinstance(part, FrozenPart):
            frozen[id(part)] = part
    return copy.deepcopy(network, frozen)


def _represent(network: TokenClassifier, tokens: Tensor) -> Tensor:
    """Return the representations (batch, size) of tokens that ``network`` has encoded."""
    representations: Tensor = network.get_submodule("projection")(tokens)
    return representations


def _rename(arrays: dict[str, Tensor], before: str, after: str) -> dict[str, Tensor]:
    head = with_prefix(after, arrays_below(before, arrays))
    return {name: a for name, a in arrays.items() if not name.startswith(before)} | head
