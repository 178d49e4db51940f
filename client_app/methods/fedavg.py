"""FedAvg at a site (McMahan et al. 2017): train the global model, send all of it back."""

from __future__ import annotations

from torch import Tensor

from fedsilo.client_app.methods.base import SiteMethod
from fedsilo.models.networks.exchanged import exchanged_arrays
from fedsilo.models.networks.site_network import SiteNetwork


class FedAvgSite(SiteMethod):
    """Receives and returns every parameter and float buffer of the network."""

    def open_network(self) -> SiteNetwork:
        """Build the network and load the global weights."""
        return self.classifier(self.request.arrays())

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return all trained weights."""
        return exchanged_arrays(network)
