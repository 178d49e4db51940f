"""FedAdam (Reddi et al. 2021): the server steps to what the sites trained as Adam does.

Equations (arXiv:2003.00295):
  (algorithm 2) m_t, v_t and the step, from v = tau^2 -> models.methods.fedadam.FedAdamSettings.step
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsilo.models.contract.settings_schema import setting


@dataclass(frozen=True)
class FedAdamSettings:
    """Settings of FedAdam: the paper's, but for the learning rate, which it tunes."""

    beta1: float = setting(0.9, "decay of the mean of the deltas", minimum=0.0, below=1.0)
    beta2: float = setting(0.99, "decay of the mean of their squares", minimum=0.0, below=1.0)
    tau: float = setting(1e-3, "adaptivity: the smaller, the more", above=0.0)
    server_learning_rate: float = setting(0.01, "eta of the server's step", above=0.0)

    def step(self, delta: Any, moments: Any = None) -> tuple[Any, Any]:
        """Return the step by ``delta``, mean minus model, and moments m and v, stacked."""
        m, v = (0.0, self.tau**2) if moments is None else moments
        m = self.beta1 * m + (1 - self.beta1) * delta
        v = self.beta2 * v + (1 - self.beta2) * delta**2
        step = self.server_learning_rate * m / (np.sqrt(v) + self.tau)
        return step, np.stack([m, v])
