"""FedAvg+FT at a site: FedAvg, then some rounds alone with a model that stays here."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedsilo.client_app.methods.fedavg import FedAvgSite
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.models.methods.fedavg_ft import FedAvgFTSettings
from fedsilo.models.networks.exchanged import exchanged_arrays
from fedsilo.models.networks.site_network import SiteNetwork


class FedAvgFTSite(FedAvgSite):
    """In a round that returns nothing it fine-tunes, from the global weights or its own."""

    settings: FedAvgFTSettings

    def open_network(self) -> SiteNetwork:
        """Load the weights that came, else the site's own."""
        return self.classifier(self.request.arrays() or self.own_arrays())

    def local_training(self, network: SiteNetwork) -> LocalTraining:
        """Fine-tune with a step size of its own."""
        training = super().local_training(network)
        if not self._finetunes():
            return training
        rate = self.settings.finetune_learning_rate
        return replace(training, settings=replace(training.settings, learning_rate=rate))

    def kept(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return the fine-tuned weights."""
        return exchanged_arrays(network) if self._finetunes() else {}

    def _finetunes(self) -> bool:
        return not self.request.instruction.returns
