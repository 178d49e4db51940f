"""FedAvg (McMahan et al. 2017): the weighted mean of what the sites trained.

Equations (arXiv:1602.05629):
  (algorithm 1, server) mean weighted by samples -> strategies.loop.ask.weighted_mean
  (algorithm 1, client) local epochs -> client_app.training.loop.train_locally
"""

from fedsilo.models.contract.own_settings import NoSettings as FedAvgSettings

__all__ = ["FedAvgSettings"]
