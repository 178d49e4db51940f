"""FedAdam (Reddi et al. 2021), and FedYogi and FedAdagrad: adaptive steps towards the mean.

Equations (arXiv:2003.00295):
  (algorithm 2, m_t and step) from v = tau^2 -> models.methods.fedadam.AdaptiveSettings.step
  (algorithm 2, FedAdam) v_t -> models.methods.fedadam.FedAdamSettings.second_moment
  (algorithm 2, FedYogi) v_t -> models.methods.fedadam.FedYogiSettings.second_moment
  (algorithm 2, FedAdagrad) v_t -> models.methods.fedadam.FedAdagradSettings.second_moment
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting

_BETA1 = 0.9  # decay of the mean of the deltas for FedAdam and FedYogi


@dataclass(frozen=True)
class AdaptiveSettings(OwnSettings):
    """Settings that all three methods share; only the learning rate differs from the paper's."""

    tau: float = setting(1e-3, "adaptivity: the smaller, the more", gt=0.0)
    server_learning_rate: float = setting(0.01, "eta of the server's step", gt=0.0)

    @property
    def mean_decay(self) -> float:
        """The decay beta_1 of the mean of the deltas."""
        return _BETA1

    @abstractmethod
    def second_moment(self, v: Any, squared: Any) -> Any:
        """Compute the new second moment from the old one, ``v``, and a round's squared delta."""

    def step(self, delta: Any, moments: Any = None) -> tuple[Any, Any]:
        """Compute the server's adaptive step for the global model, and the new moments.

        - The mean m becomes beta_1 m + (1 - beta_1) delta, where beta_1 is ``mean_decay``.
        - The second moment v becomes ``second_moment`` (v, delta^2), which each method defines.
        - The step is 'server-learning-rate' * m / (sqrt(v) + 'tau'), without Adam's bias
          correction.

        Args:
            delta: the sites' mean model, minus the global model, as an array.
            moments: m and v of the last round, stacked. None before the first round, where m starts
                at 0 and v at tau^2.

        Returns:
            The step, to add to the global model, and the new m and v, stacked float64. The step has
            the shape of ``delta``.
        """
        # Adam's bias correction is left out. The paper starts v at tau^2 instead, which bounds the
        # first steps
        if moments is None:
            moments = np.zeros_like(delta), np.full_like(delta, self.tau**2)
        m, v = np.asarray(moments, np.float64)
        m = self.mean_decay * m + (1 - self.mean_decay) * delta
        v = self.second_moment(v, delta**2)
        step = self.server_learning_rate * m / (np.sqrt(v) + self.tau)
        return step, np.stack([m, v])


@dataclass(frozen=True)
class FedAdamSettings(AdaptiveSettings):
    """Settings of FedAdam."""

    title = "FedAdam"
    server = "fedsilo.strategies.methods.fedavgm:FedAvgM"
    site = "fedsilo.client_app.methods.fedavg:FedAvgSite"
    sums_suffice = True

    beta2: float = setting(0.99, "decay of the mean of their squares", ge=0.0, lt=1.0)

    def second_moment(self, v: Any, squared: Any) -> Any:
        """Return the decaying mean of the squares, beta2 v + (1 - beta2) squared."""
        return self.beta2 * v + (1 - self.beta2) * squared


@dataclass(frozen=True)
class FedYogiSettings(FedAdamSettings):
    """Settings of FedYogi, whose second moment changes by at most the squared delta."""

    title = "FedYogi"
    server = "fedsilo.strategies.methods.fedavgm:FedAvgM"
    site = "fedsilo.client_app.methods.fedavg:FedAvgSite"
    sums_suffice = True

    def second_moment(self, v: Any, squared: Any) -> Any:
        """Return v - (1 - beta2) squared sign(v - squared)."""
        return v - (1 - self.beta2) * squared * np.sign(v - squared)


@dataclass(frozen=True)
class FedAdagradSettings(AdaptiveSettings):
    """Settings of FedAdagrad, whose second moment is the sum of all squares.

    The paper sets beta_1 to 0, because Adagrad does not use momentum (appendix D).
    """

    title = "FedAdagrad"
    server = "fedsilo.strategies.methods.fedavgm:FedAvgM"
    site = "fedsilo.client_app.methods.fedavg:FedAvgSite"
    sums_suffice = True

    group: ClassVar[str] = "fedadagrad"
    beta1: float = setting(0.0, "decay of the mean of the deltas", ge=0.0, lt=1.0)

    @property
    def mean_decay(self) -> float:
        """The decay beta_1 of the mean of the deltas."""
        return self.beta1

    def second_moment(self, v: Any, squared: Any) -> Any:
        """Return the sum of all squared deltas so far: v plus ``squared``."""
        return v + squared
