"""Each silo alone: the model stays at the site, only metrics leave."""

from __future__ import annotations

from torch import Tensor

from fedsilo.client_app.methods.base import SiteMethod
from fedsilo.models.contract.messages import START
from fedsilo.models.networks.exchanged import exchanged_arrays
from fedsilo.models.networks.site_network import SiteNetwork


class LocalSite(SiteMethod):
    """Goes on from its own weights of the round before; the first are the seed's, or what came."""

    def open_network(self) -> SiteNetwork:
        """Build the network from this site's own state, else from what it is to start from."""
        return self.classifier(self.own_state() or self.request.arrays(START) or None)

    def came(self) -> dict[str, Tensor]:
        """Return the arrays that came, but for what the site starts from."""
        arrays = self.request.arrays()
        return {name: array for name, array in arrays.items() if not name.startswith(START)}

    def clip_reference(self) -> dict[str, Tensor]:
        """Return what came of others: nobody else has seen what the site starts from change."""
        return self.came()

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return nothing: no weights leave the site."""
        return {}

    def kept(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the trained weights, kept at the site."""
        return exchanged_arrays(network)
