"""FedRep (Collins et al. 2021): FedPer whose silos train the head first, then the shared layers.

Equations (arXiv:2102.07078):
  (algorithm 1, line 7) steps of the head -> models.methods.fedrep.FedRepSettings.head_steps
  (algorithm 1, line 9) steps of the representation -> client_app.methods.fedrep.FedRepSite.train
"""

from dataclasses import dataclass

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import setting
from fedsilo.models.methods.fedper import FedPerSettings


@dataclass(frozen=True)
class FedRepSettings(FedPerSettings):
    """Settings of FedRep."""

    title = "FedRep"
    server = "fedsilo.strategies.methods.fedper:FedRep"
    site = "fedsilo.client_app.methods.fedrep:FedRepSite"
    sums_suffice = True

    head_share: float = setting(
        0.5, "share of a round's steps that train the head alone", gt=0.0, lt=1.0
    )

    def head_steps(self, steps: int) -> int:
        """Compute how many optimiser steps of a round train only the head of the network.

        The head is trained first, and the remaining steps train all other layers. The result is the
        setting 'head-share' times ``steps``, rounded to a whole number. It is at least 1 and at
        most ``steps`` - 1.

        Args:
            steps: the number of steps in the round, at least 2.
        """
        # Whatever the rounding, head and body each get at least one step
        return min(max(round(self.head_share * steps), 1), steps - 1)

    def check(self, common: CommonSettings, is_table: bool) -> None:
        """Check that a round is not a single step, because head and other layers each need one.

        Args:
            common: the run's common settings.
            is_table: ignored.

        Raises:
            SettingError: 'train.local-steps' is 1.
        """
        if common.local_steps == 1:
            raise SettingError(
                f"setting 'train.local-steps' is 1, and {common.method} trains the head first, "
                "then the rest: set it to 2 or more, or choose 'fedper'"
            )
