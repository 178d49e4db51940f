"""The oracle: one simulated site trains on the training data of all, which no hospital could."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import cast

import torch
from torch import nn

from client_app.methods.fedavg import FedAvgSite
from client_app.methods.learner import set_prior
from client_app.opening import ready_silo
from client_app.training.evaluation import measure
from datasets.registry import load_silo
from datasets.silo.silos import Split
from models.contract.errors import SiteError
from models.contract.messages import TRAINED
from models.contract.settings import CommonSettings
from models.networks.site_network import SiteNetwork


class MixSite(FedAvgSite):
    """Trains on pooled data if the server names it as the trainer, else only measures."""

    def fit(self, network: SiteNetwork) -> float:
        """Train on the pooled data, or return the loss on this site's own."""
        if self.request.instruction.returns:
            module = cast(nn.Module, network)
            set_prior(module, self.training_data().labels)
            loss = super().fit(network)
            set_prior(module, self.silo.train.labels)  # it is measured as everywhere
            return loss
        key = (self.request.instruction.round, self.silo.name, "train")
        return measure(network, self.silo.train, self.common, self.compute, key)["loss"]

    def measured(
        self, network: SiteNetwork, model: str, splits: tuple[str, ...]
    ) -> dict[str, float]:
        """Measure a trained model only where one was trained."""
        trained = self.request.instruction.returns or model != TRAINED
        return super().measured(network, model, splits) if trained else {}

    def training_settings(self) -> CommonSettings:
        """Take as many steps as all sites together would."""
        sites = len(str(self.request.instruction.notes["sites"]).split("\n"))
        return dataclasses.replace(self.common, local_steps=sites * self.common.local_steps)

    @lru_cache(maxsize=1)  # noqa: B019  # a method lives for one message
    def training_data(self) -> Split:
        """Return the training data of all sites that take part.

        Raises:
            SiteError: this is no simulation.
        """
        if not self.request.simulated:
            raise SiteError(
                f"site {self.silo.name}: method 'mix' pools the data of all sites, which only a "
                "simulation can; choose a federated method"
            )
        names = str(self.request.instruction.notes["sites"]).split("\n")
        silos = [
            ready_silo(load_silo(name, self.common), self.common, self.request.content)
            for name in names
        ]
        return Split(
            torch.cat([silo.train.inputs for silo in silos]),
            torch.cat([silo.train.labels for silo in silos]),
        )
