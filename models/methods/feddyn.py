"""FedDyn (Acar et al. 2021): each site's loss gets a term that changes from round to round.

At a fixed point all sites have the same weights. There the gradients of the sites' own losses,
weighted by samples like all means here, add up to 0.

Equations (arXiv:2111.04263):
  (1, first term) the local gradient, as a slope -> models.methods.fedprox.linear_term
  (1, second term) alpha / 2 ||w - w_global||^2 -> models.methods.fedprox.proximal_term
  (2) the local gradient after the round -> client_app.methods.feddyn.FedDynSite.train
  (algorithm 1, h and theta) server step -> strategies.methods.drift_correction.FedDyn.round
"""

from dataclasses import dataclass

from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting


@dataclass(frozen=True)
class FedDynSettings(OwnSettings):
    """Settings of FedDyn."""

    title = "FedDyn"
    server = "fedsilo.strategies.methods.drift_correction:FedDyn"
    site = "fedsilo.client_app.methods.feddyn:FedDynSite"
    sums_suffice = True

    regularisation_alpha: float = setting(0.01, "alpha of the proximal term", gt=0.0)
