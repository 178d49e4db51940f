"""The ensemble at a site: a model of its own, sent after the last round, and the mean of all."""

from __future__ import annotations

from torch import Tensor

from fedsilo.client_app.methods.local import LocalSite
from fedsilo.models.networks.exchanged import exchanged_arrays
from fedsilo.models.networks.mixture import Mixture, open_experts
from fedsilo.models.networks.site_network import SiteNetwork


class EnsembleSite(LocalSite):
    """Trains alone as ``local`` does; once all experts are known, measures their mean."""

    def open_network(self) -> SiteNetwork:
        """Return the mean of the experts that came, else this site's own model."""
        if arrays := self.came():
            experts = open_experts(self.common, self.silo.task, arrays)
            return self.compute.place(Mixture(experts))
        return super().open_network()

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the expert, when it is asked for."""
        return exchanged_arrays(network)
