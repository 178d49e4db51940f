"""FedNova (Wang et al. 2020): updates are divided by the site's steps before they are averaged.

The optimiser is the run's. An update is divided by ||a_i||_1, which here is the number of its
steps, as for SGD without momentum.

Equations (arXiv:2007.07481):
  (6, d_i) normalised update -> client_app.methods.fednova.FedNovaSite.train
  (6, tau_eff) mean of the sites' steps -> strategies.methods.drift_correction.FedNova.round
"""

from dataclasses import dataclass

from fedsilo.core.settings.own_settings import OwnSettings

STEPS = "steps"  # metric: optimiser steps of the site in the round


@dataclass(frozen=True)
class FedNovaSettings(OwnSettings):
    """FedNova has no settings of its own."""

    title = "FedNova"
    server = "fedsilo.strategies.methods.drift_correction:FedNova"
    site = "fedsilo.client_app.methods.fednova:FedNovaSite"
    sums_suffice = True
