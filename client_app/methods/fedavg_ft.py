"""FedAvg+FT at a site: FedAvg, then some rounds alone with a model that stays here."""

from __future__ import annotations

import dataclasses
from typing import cast

from torch import Tensor, nn

from client_app.methods.fedavg import FedAvgSite
from models.contract.settings import CommonSettings
from models.methods.fedavg_ft import FedAvgFTSettings
from models.networks.exchanged import exchanged_arrays
from models.networks.site_network import SiteNetwork


class FedAvgFTSite(FedAvgSite):
    """In a round that returns nothing it fine-tunes, from the global weights or its own."""

    settings_class = FedAvgFTSettings
    settings: FedAvgFTSettings

    def open_network(self) -> SiteNetwork:
        """Load the weights that came, else the site's own."""
        return self.classifier(self.request.arrays() or self.own_arrays())

    def training_settings(self) -> CommonSettings:
        """Fine-tune with a step size of its own."""
        if not self._finetunes():
            return self.common
        rate = self.settings.finetune_learning_rate
        return dataclasses.replace(self.common, learning_rate=rate)

    def kept(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the fine-tuned weights."""
        return exchanged_arrays(cast(nn.Module, network)) if self._finetunes() else {}

    def _finetunes(self) -> bool:
        return not self.request.instruction.returns
