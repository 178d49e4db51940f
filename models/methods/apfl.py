"""APFL (Deng, Kamani and Mahdavi 2020): each silo mixes a model of its own with the global one.

Equations (arXiv:2003.13461):
  (4, mixture) alpha v + (1 - alpha) w -> models.methods.apfl.mixture
  (algorithm 1, local steps) of w and v -> client_app.methods.apfl.APFLSite.train
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedsilo.core.array_names import is_statistic
from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting


@dataclass(frozen=True)
class APFLSettings(OwnSettings):
    """Settings of APFL; alpha is the same for all silos and rounds."""

    title = "APFL"
    server = "fedsilo.strategies.methods.personal_models:Ditto"
    site = "fedsilo.client_app.methods.apfl:APFLSite"
    sums_suffice = True
    why_not_private = "trains a second model by the same batches, whose gradients are not bounded"

    mixing_alpha: float = setting(
        0.5, "alpha: weight of the silo's own model in what it predicts with", gt=0.0, lt=1.0
    )


def mixture(
    own: Mapping[str, Tensor], shared: Mapping[str, Tensor], alpha: float
) -> dict[str, Tensor]:
    """Mix the site's own model v and the shared model w: alpha v + (1 - alpha) w for each array.

    Both models must have the same arrays. The running statistics of batch norm are taken from v
    unmixed, because a mean of two variances is not the variance of the mixture.
    """
    # Starting from v keeps its running statistics
    mixed = dict(own)
    for name, v in own.items():
        if not is_statistic(name):
            mixed[name] = alpha * v + (1 - alpha) * shared[name]
    return mixed
