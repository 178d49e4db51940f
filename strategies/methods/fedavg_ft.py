"""FedAvg with personal fine-tuning: FedAvg, then each site goes on alone.

Messages as FedAvg's until the last ``finetune-rounds``; in the first of those the global weights go
out once more, and from then on no array crosses the wire: the personal models stay at the sites.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings import AGGREGATIONS, CommonSettings
from fedsilo.models.methods.fedavg_ft import FedAvgFTSettings
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.reporting import Disclosures
from fedsilo.strategies.loop.state import ArraySpec, RoundState, SiteReply
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.methods.personal_models import keepers, with_keepers
from fedsilo.strategies.wire.records import NDArray


class FedAvgFT(FedAvg):
    """Averages, then lets each site fine-tune the average."""

    settings: FedAvgFTSettings
    title = "FedAvg+FT"
    # No paced epochs: by what a site keeps the server tells that it fine-tunes
    capabilities = Capabilities(initial_weights=True, aggregations=AGGREGATIONS)

    @classmethod
    def check_settings(cls, common: CommonSettings, settings: FedAvgFTSettings) -> None:
        """Refuse a run that would fine-tune nothing."""
        if settings.finetune_rounds >= common.rounds:
            raise SettingError(
                f"setting 'fedavg-ft.finetune-rounds' is {settings.finetune_rounds} and 'rounds' "
                "is "
                f"{common.rounds}: no round of FedAvg is left; raise 'rounds', or choose 'local'"
            )

    def disclosures(self) -> Disclosures:
        """Name the weights, of the rounds of FedAvg."""
        averaged = self.common.rounds - self.settings.finetune_rounds
        return Disclosures(
            f"all weights and batch-norm statistics of the network, each of the first {averaged} "
            "rounds; the fine-tuned model stays at the site"
        )

    def outgoing(self, phase: str, site: str, state: RoundState) -> Mapping[str, NDArray]:
        """Return the global weights to all that have no personal model yet."""
        return {} if site in keepers(state, self.common) else state.arrays

    def expected(self, phase: str, site: str, state: RoundState) -> Mapping[str, ArraySpec]:
        """Expect trained weights while there is averaging."""
        return {} if self._finetunes(state) else super().expected(phase, site, state)

    def combine(
        self, phase: str, state: RoundState, replies: Mapping[str, SiteReply]
    ) -> RoundState:
        """Return the mean; of fine-tuning, who keeps its own model now."""
        if self._finetunes(state):
            return with_keepers(state, self.common, replies)
        return super().combine(phase, state, replies)

    def _finetunes(self, state: RoundState) -> bool:
        return state.round >= self.common.rounds - self.settings.finetune_rounds
