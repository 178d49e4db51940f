"""DisTrans at a site: train the two-channel network and, by SGD of its own, the offset.

With ``offset-aggregation`` "none" the offset (``offset.weight``) is state of the site, first drawn
from the site's own seed, and is neither received nor sent.
"""

from typing import cast

import torch
from torch import Tensor

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteMethod, SiteNetwork
from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.client_app.training.optimisers import eager
from fedsilo.models.methods.distrans import (
    OFFSET,
    OFFSETS,
    DisTransSettings,
    DoubleChannelClassifier,
    double_channels,
)
from fedsilo.models.networks.site_network import exchanged_arrays, load_exchanged


class DisTransSite(SiteMethod):
    """Receives and returns the network and, unless it stays, the offset."""

    settings: DisTransSettings

    def open(self, lab: Lab) -> SiteNetwork:
        """Build the network with the global weights and the site's offset."""
        single, shape = initial_classifier(lab.common, lab.silo), lab.silo.task.input_shape
        network = double_channels(single, lab.sampling, shape, lab.site)
        load_exchanged(network, self._weights(lab, network))
        return lab.compute.place(network)

    def train(self, lab: Lab) -> Outgoing:
        """Train network and offset; keep the offset if it stays, and send it otherwise.

        One gradient serves both steps, as in the authors' code.
        """
        network = cast(DoubleChannelClassifier, lab.open())
        lab.measure(network)
        rate = self.settings.offset_learning_rate
        lab.fit(network, beside=eager(torch.optim.SGD)(network.apart_parameters(), lr=rate))
        arrays = exchanged_arrays(network)
        if not self._stays():
            return Outgoing(network, send=arrays)
        return Outgoing(network, keep={OFFSET: arrays.pop(OFFSET)}, send=arrays)

    def _stays(self) -> bool:
        return self.settings.offset_aggregation == "none"

    def _weights(self, lab: Lab, network: DoubleChannelClassifier) -> dict[str, Tensor]:
        """Return the received arrays with this site's offset, and without those of other sites.

        The offset is the site's own state if it never leaves, else the received one.
        """
        arrays = lab.arrays()
        if self._stays():
            return arrays | {OFFSET: network.offset.weight.detach()} | lab.state()
        own = arrays.get(f"{OFFSETS}{lab.site}")  # only a finished run's model has offsets by site
        named = {n: array for n, array in arrays.items() if not n.startswith(OFFSETS)}
        return named if own is None else named | {OFFSET: own}
