"""Ditto (Li et al. 2021): FedAvg, and a second model of each silo that stays near.

Equations (arXiv:2012.04221):
  (algorithm 1, w) the global model -> strategies.methods.fedavg.FedAvg.round
  (2) the own model's proximal term -> models.methods.fedprox.proximal_term
"""

from dataclasses import dataclass

from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting


@dataclass(frozen=True)
class DittoSettings(OwnSettings):
    """Settings of Ditto; lambda 0, which is ``local`` next to FedAvg, is not allowed."""

    title = "Ditto"
    server = "fedsilo.strategies.methods.personal_models:Ditto"
    site = "fedsilo.client_app.methods.ditto:DittoSite"
    sums_suffice = True

    personal_lambda: float = setting(0.1, "lambda: pull towards the global model", gt=0.0)
