"""FedAvg+FT ("FedAvgPers"): FedAvg, then each site fine-tunes the model on its own data.

Equations (AAAI 2024, vol. 38 no. 21, pages 23482-23483):
  (objective) each site's own last rounds -> client_app.methods.fedavg_ft.FedAvgFTSite

FedBABU (Oh, Kim and Yun 2022): the head stays as it began until the silos fine-tune at the end.

Equations (arXiv:2106.06042):
  (algorithm 1, body update) head's rate 0 -> client_app.methods.fedbabu.FedBABUSite.train
  (section 5, fine-tuning) at the end -> strategies.methods.personal_models.FedAvgFT.round
"""

from dataclasses import dataclass

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting


@dataclass(frozen=True)
class FedAvgFTSettings(OwnSettings):
    """The length and the step size of each site's training on its own data at the end."""

    title = "FedAvg+FT"
    server = "fedsilo.strategies.methods.personal_models:FedAvgFT"
    site = "fedsilo.client_app.methods.fedavg_ft:FedAvgFTSite"

    finetune_rounds: int = setting(5, "last rounds, in which each site trains alone", ge=1)
    finetune_learning_rate: float = setting(1e-3, "step size in those rounds", gt=0.0)

    def check(self, common: CommonSettings, is_table: bool) -> None:
        """Check that at least one round of FedAvg is left before the rounds of fine-tuning.

        Args:
            common: the run's common settings.
            is_table: ignored.

        Raises:
            SettingError: 'fedavg-ft.finetune-rounds' is at least 'rounds'.
        """
        if self.finetune_rounds >= common.rounds:
            raise SettingError(
                f"setting 'fedavg-ft.finetune-rounds' is {self.finetune_rounds} and 'rounds' "
                f"is {common.rounds}: no round of FedAvg is left; raise 'rounds', or choose 'local'"
            )


@dataclass(frozen=True)
class FedBABUSettings(FedAvgFTSettings):
    """FedBABU has the settings of FedAvg+FT."""

    title = "FedBABU"
    server = "fedsilo.strategies.methods.personal_models:FedBABU"
    site = "fedsilo.client_app.methods.fedbabu:FedBABUSite"
