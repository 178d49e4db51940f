"""FedAvg with personal fine-tuning (FedAvg+FT): its settings."""

from __future__ import annotations

from dataclasses import dataclass

from models.contract.settings_schema import setting


@dataclass(frozen=True)
class FedAvgFTSettings:
    """How long and how fast each site trains the global model on its own data at the end."""

    finetune_rounds: int = setting(5, "last rounds, in which each site trains alone", minimum=1)
    finetune_learning_rate: float = setting(1e-3, "step size in those rounds", above=0.0)
