"""FedBN (Li et al. 2021): batch norm's weights and statistics are each silo's own.

Equations (arXiv:2102.07623):
  (algorithm 1, "if not BatchNorm") what stays -> models.methods.fedbn.FedBNSettings.personal
"""

from dataclasses import dataclass

from torch import nn

from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.models.networks.site_network import batch_norms


@dataclass(frozen=True)
class FedBNSettings(OwnSettings):
    """FedBN has no settings."""

    title = "FedBN"
    server = "fedsilo.strategies.methods.fedper:FedBN"
    site = "fedsilo.client_app.methods.fedper:FedPerSite"
    sums_suffice = True
    why_not_private = "keeps each site's batch norms, and private training has none"

    def personal(self, network: nn.Module) -> list[str]:
        """Return the names of the arrays that stay at the site: all arrays of batch norms."""
        return batch_norms(network)
