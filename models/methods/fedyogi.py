"""FedYogi (Reddi et al. 2021): FedAdam whose second moment moves by no more than the square.

Equations (arXiv:2003.00295):
  (algorithm 2, FedYogi) v_t -> models.methods.fedyogi.FedYogiSettings.second_moment
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsilo.models.methods.fedadam import FedAdamSettings


@dataclass(frozen=True)
class FedYogiSettings(FedAdamSettings):
    """Settings of FedYogi."""

    def second_moment(self, v: Any, squared: Any) -> Any:
        """Return v - (1 - beta2) squared sign(v - squared)."""
        return v - (1 - self.beta2) * squared * np.sign(v - squared)
