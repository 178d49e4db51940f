"""FedAdam (Reddi et al. 2021): the server applies Adam to the sites' mean update.

Equations (arXiv:2003.00295):
  (algorithm 2) m_t, v_t and the step, from v = tau^2 -> models.methods.fedadam.FedAdamSettings.step
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsilo.models.contract.settings_schema import setting


@dataclass(frozen=True)
class FedAdamSettings:
    """Settings of FedAdam, with the paper's values except for the learning rate, which it tunes."""

    beta1: float = setting(0.9, "decay of the mean of the deltas", minimum=0.0, below=1.0)
    beta2: float = setting(0.99, "decay of the mean of their squares", minimum=0.0, below=1.0)
    tau: float = setting(1e-3, "adaptivity: the smaller, the more", above=0.0)
    server_learning_rate: float = setting(0.01, "eta of the server's step", above=0.0)

    def step(self, delta: Any, moments: Any = None) -> tuple[Any, Any]:
        """Return the step for ``delta``, mean minus model, and the moments m and v, stacked."""
        # No bias correction, unlike Adam: the paper starts v at tau^2, so early steps stay bounded
        m, v = (0.0, self.tau**2) if moments is None else moments
        m = self.beta1 * m + (1 - self.beta1) * delta
        v = self.beta2 * v + (1 - self.beta2) * delta**2
        step = self.server_learning_rate * m / (np.sqrt(v) + self.tau)
        return step, np.stack([m, v])
