"""Each silo alone: the model stays at the site, only metrics leave."""

from __future__ import annotations

from torch import Tensor

from client_app.methods.base import SiteMethod
from models.networks.exchanged import exchanged_arrays
from models.networks.site_network import SiteNetwork


class LocalSite(SiteMethod):
    """Goes on from its own weights of the round before; the first are the seed's, as everywhere."""

    def open_network(self) -> SiteNetwork:
        """Build the network from this site's own state."""
        return self.classifier(self.own_state() or None)

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return nothing: no weights leave the site."""
        return {}

    def kept(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the trained weights, kept at the site."""
        return exchanged_arrays(network)
