"""Cyclic weight transfer (Chang et al. 2018): one silo after the other trains the same model.

Equations (doi:10.1093/jamia/ocy017):
  (cyclical weight transfer) a round is one lap -> strategies.methods.fedavg.Cyclic.round
"""

from dataclasses import dataclass

from fedsilo.core.settings.own_settings import OwnSettings


@dataclass(frozen=True)
class CyclicSettings(OwnSettings):
    """Cyclic has no settings of its own."""

    title = "Cyclic"
    server = "fedsilo.strategies.methods.fedavg:Cyclic"
    site = "fedsilo.client_app.methods.fedavg:FedAvgSite"
