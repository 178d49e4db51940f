"""FedAvgM (Hsu et al. 2019): the server applies momentum to the sites' mean update.

Equations (arXiv:1909.06335):
  (server momentum) v = beta v + delta -> models.methods.fedavgm.FedAvgMSettings.step
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting


@dataclass(frozen=True)
class FedAvgMSettings(OwnSettings):
    """Settings of FedAvgM; with momentum 0 and learning rate 1 it is FedAvg up to rounding."""

    title = "FedAvgM"
    server = "fedsilo.strategies.methods.fedavgm:FedAvgM"
    site = "fedsilo.client_app.methods.fedavg:FedAvgSite"
    sums_suffice = True

    momentum: float = setting(0.9, "beta of the server's momentum", ge=0.0, lt=1.0)
    server_learning_rate: float = setting(1.0, "eta of the server's step", gt=0.0)

    def step(self, delta: Any, v: Any = None) -> tuple[Any, Any]:
        """Compute the server's step with momentum for the global model, and the new momentum.

        The new momentum is 'momentum' times the old one, plus ``delta``. The step is the new
        momentum times 'server-learning-rate'.

        Args:
            delta: the sites' mean model, minus the global model, as an array.
            v: the momentum of the last round. None before the first step, where it counts as 0.

        Returns:
            The step, to add to the global model, and the new momentum. Each is float64 with the
            shape of ``delta``.
        """
        if v is None:
            v = 0.0
        v = self.momentum * np.asarray(v, np.float64) + delta
        return self.server_learning_rate * v, v
