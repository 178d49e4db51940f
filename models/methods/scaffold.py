"""SCAFFOLD (Karimireddy et al. 2020): control variates take the sites' own drift out of each step.

Site i steps by g_i(y) - c_i + c, where c_i is its mean gradient of its last round and c the sites'
mean of all c_i, weighted by samples. Option II of the paper, c_i - c + (x - y) / (K eta), equals
the mean of the K steps' gradients for plain SGD. This mean is computed here, so any optimiser can
take the steps.

In the paper all sites have equal weights and take the same number of steps K. Here site i has n_i
samples and takes K_i steps. The model moves by the mean of y_i - x, weighted by n_i / K_i. To first
order y_i - x is K_i steps of -eta (g_i - c_i + c), so with these weights the corrections of all
sites add up to 0, as in the paper, and the model moves by the mean gradient over all samples. With
the weights n_i the corrections would not cancel: a site with many steps and a flat loss follows its
correction of the last round, the other sites' control variates respond a round later, and these
movements may grow from round to round until the run diverges.

Equations (arXiv:1910.06378):
  (3) local step -> models.methods.fedprox.linear_term
  (4, option II) the site's control variate -> client_app.methods.scaffold.SCAFFOLDSite.train
  (5) server step, for unequal steps -> strategies.methods.drift_correction.SCAFFOLD.round
"""

from dataclasses import dataclass

from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting

# Wire names are control/<array>. eta c is sent instead of c, because it has the size of a step, as
# updates have
CONTROL = "control/"
INVERSE_STEPS = "inverse-steps"  # metric: 1 / (the site's optimiser steps in the round)


@dataclass(frozen=True)
class SCAFFOLDSettings(OwnSettings):
    """Settings of SCAFFOLD."""

    title = "SCAFFOLD"
    server = "fedsilo.strategies.methods.drift_correction:SCAFFOLD"
    site = "fedsilo.client_app.methods.scaffold:SCAFFOLDSite"
    sums_suffice = True

    server_learning_rate: float = setting(1.0, "eta_g of the server's step", gt=0.0)
