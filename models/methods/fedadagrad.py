"""FedAdagrad (Reddi et al. 2021): FedAdam whose second moment is the sum of all squares.

Equations (arXiv:2003.00295):
  (algorithm 2, FedAdagrad) v_t -> models.methods.fedadagrad.FedAdagradSettings.second_moment
"""

from dataclasses import dataclass
from typing import Any

from fedsilo.models.methods.fedadam import AdaptiveSettings


@dataclass(frozen=True)
class FedAdagradSettings(AdaptiveSettings):
    """Settings of FedAdagrad."""

    def second_moment(self, v: Any, squared: Any) -> Any:
        """Return the sum of squares."""
        return v + squared
