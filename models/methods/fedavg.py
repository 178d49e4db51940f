"""FedAvg (McMahan et al. 2017): the weighted mean of the weights that the sites trained.

Equations (arXiv:1602.05629):
  (algorithm 1, server) mean weighted by samples -> strategies.loop.ask.weighted_mean
  (algorithm 1, client) local epochs -> client_app.training.loop.LocalTraining.run
"""

from dataclasses import dataclass

from fedsilo.core.settings.own_settings import OwnSettings


@dataclass(frozen=True)
class FedAvgSettings(OwnSettings):
    """FedAvg has no settings of its own."""

    title = "FedAvg"
    server = "fedsilo.strategies.methods.fedavg:FedAvg"
    site = "fedsilo.client_app.methods.fedavg:FedAvgSite"
    sums_suffice = True
