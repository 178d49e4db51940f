"""The oracle: one simulated site trains on the training data of all, which no hospital could."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedsilo.client_app.methods.base import plain_training
from fedsilo.client_app.methods.fedavg import FedAvgSite
from fedsilo.client_app.site.standardised import ready_silo
from fedsilo.client_app.training.initial_network import set_prior
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.datasets.registry import load_silo
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.errors import SiteError
from fedsilo.models.methods.mix import PoolNotes
from fedsilo.models.networks.site_network import SiteNetwork


class MixSite(FedAvgSite):
    """Trains on pooled data if the server names it as the trainer, else only measures."""

    def local_training(self, network: SiteNetwork) -> LocalTraining:
        """Train on the pooled data, in as many steps as all sites together would take."""
        if not self.request.instruction.returns:
            return replace(super().local_training(network), only_measured=True)
        pooled, own, module = self.pooled(), self.silo.train, network
        steps = len(self._sites()) * self.common.local_steps
        settings = replace(self.common, local_steps=steps)
        set_prior(module, pooled.labels)
        training = plain_training(self.context, network, pooled, settings)
        # It is measured as everywhere
        return replace(training, ended=lambda: set_prior(module, own.labels))

    def pooled(self) -> Split:
        """Return the training data of all sites that take part.

        Raises:
            SiteError: this is no simulation.
        """
        if not self.request.simulated:
            raise SiteError(
                f"site {self.silo.name}: method 'mix' pools the data of all sites, which only a "
                "simulation can; choose a federated method"
            )
        silos = [
            ready_silo(load_silo(name, self.common), self.common, self.request.content)
            for name in self._sites()
        ]
        return Split(
            torch.cat([silo.train.inputs for silo in silos]),
            torch.cat([silo.train.labels for silo in silos]),
        )

    def _sites(self) -> tuple[str, ...]:
        return PoolNotes.from_values(self.request.instruction.notes).sites
