"""FedAvg with personal fine-tuning, a baseline of PICSR and of FedEvPrompt ("FedAvgPers").

Equations (AAAI 2024, vol. 38 no. 21, pages 23482-23483):
  (objective) each site's own last rounds -> client_app.methods.fedavg_ft.FedAvgFTSite
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsilo.models.contract.settings_schema import setting


@dataclass(frozen=True)
class FedAvgFTSettings:
    """How long and how fast each site trains the global model on its own data at the end."""

    finetune_rounds: int = setting(5, "last rounds, in which each site trains alone", minimum=1)
    finetune_learning_rate: float = setting(1e-3, "step size in those rounds", above=0.0)
