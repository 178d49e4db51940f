"""FedSWA: FedAvg whose final model is the mean of the models of its last rounds.

Stochastic weight averaging (Izmailov et al. 2018) at the server, as Caldarola et al. 2022 do it.

Equations (arXiv:2203.11834, after arXiv:1803.05407):
  (algorithm 1, w_SWA) running mean -> models.methods.fedswa.running_mean
"""

from dataclasses import dataclass
from typing import Any

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting


@dataclass(frozen=True)
class FedSWASettings(OwnSettings):
    """Settings of FedSWA."""

    title = "FedSWA"
    server = "fedsilo.strategies.methods.fedavgm:FedSWA"
    site = "fedsilo.client_app.methods.fedavg:FedAvgSite"
    sums_suffice = True

    averaged_rounds: int = setting(5, "last rounds whose models are averaged", ge=1)

    def check(self, common: CommonSettings, is_table: bool) -> None:
        """Check that the run has enough rounds for the final mean of models.

        Args:
            common: the run's common settings.
            is_table: ignored.

        Raises:
            SettingError: 'fedswa.averaged-rounds', the number of averaged rounds, is above
                'rounds'.
        """
        if self.averaged_rounds > common.rounds:
            raise SettingError(
                f"setting 'fedswa.averaged-rounds' is {self.averaged_rounds}, more than "
                f"'rounds' ({common.rounds}): lower it, or raise 'rounds'"
            )


def running_mean(mean: Any, model: Any, before: int) -> Any:
    """Add one more model to a running mean of models, and return the new mean.

    Args:
        mean: the mean of the models so far, an array.
        model: the next model, an array of the same shape.
        before: the number of models so far. With 0 the result is ``model``.
    """
    return (mean * before + model) / (before + 1)
