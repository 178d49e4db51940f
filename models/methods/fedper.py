"""FedPer (Arivazhagan et al. 2019): each silo keeps its last layers; other layers are averaged.

Equations (arXiv:1912.00818):
  (algorithm 1, W_P) which layers stay -> models.methods.fedper.FedPerSettings.personal
  (algorithm 1, client) trains both together -> client_app.methods.fedper.FedPerSite.train
"""

from dataclasses import dataclass

from torch import nn

from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting
from fedsilo.models.networks.site_network import last_layers


@dataclass(frozen=True)
class FedPerSettings(OwnSettings):
    """Settings of FedPer; FedRep extends them."""

    title = "FedPer"
    server = "fedsilo.strategies.methods.fedper:FedPer"
    site = "fedsilo.client_app.methods.fedper:FedPerSite"
    sums_suffice = True

    personal_layers: int = setting(1, "last layers with weights that stay at the silo", ge=1)

    def personal(self, network: nn.Module) -> list[str]:
        """Return the names of the arrays that stay at the site.

        They are the arrays of the last layers of the network, whose number is 'personal-layers'.
        """
        return last_layers(network, self.personal_layers)
