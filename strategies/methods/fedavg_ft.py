"""FedAvg with personal fine-tuning: FedAvg, then each site goes on alone.

Messages as FedAvg's until the last ``finetune-rounds``; in the first of those the global weights go
out once more, and from then on no array crosses the wire: the personal models stay at the sites.
"""

from __future__ import annotations

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import EVALUATE, TRAIN
from fedsilo.models.contract.settings import AGGREGATIONS, CommonSettings
from fedsilo.models.methods.fedavg_ft import FedAvgFTSettings
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.ask import Ask
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.method import Disclosures, State
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.methods.personal_models import PersonalState, keepers, with_keepers
from fedsilo.strategies.wire.reply import Arrays


class FedAvgFT(FedAvg):
    """Averages, then lets each site fine-tune the average."""

    settings: FedAvgFTSettings
    title = "FedAvg+FT"
    # No paced epochs: by what a site keeps the server knows that it fine-tunes
    capabilities = Capabilities(initial_weights=True, aggregations=AGGREGATIONS)
    state_class = PersonalState

    @classmethod
    def check_settings(cls, common: CommonSettings, settings: FedAvgFTSettings) -> None:
        """Refuse a run that would fine-tune nothing."""
        if settings.finetune_rounds >= common.rounds:
            raise SettingError(
                f"setting 'fedavg-ft.finetune-rounds' is {settings.finetune_rounds} and 'rounds' "
                f"is {common.rounds}: no round of FedAvg is left; raise 'rounds', or choose 'local'"
            )

    def initial_state(self, task: Task) -> PersonalState:
        """Return the network's initial weights, keyed on the seed."""
        return PersonalState(super().initial_state(task).arrays)

    def round(self, state: PersonalState, ask: Ask) -> State:
        """Average as FedAvg does; in the last rounds have each site fine-tune its own model."""
        if self._finetunes(state):
            alone = ask(TRAIN, self._weights_for(ask, state), expect={})
            return with_keepers(state, self.common, alone)
        after: State = super().round(state, ask)
        return after

    def evaluate(self, state: PersonalState, ask: Ask) -> None:
        """Have the personal models measured, or the global one where a site has none."""
        ask(EVALUATE, self._weights_for(ask, state), expect={})

    def disclosures(self) -> Disclosures:
        """Name the weights, of the rounds of FedAvg."""
        averaged = self.common.rounds - self.settings.finetune_rounds
        return Disclosures(
            f"all weights and batch-norm statistics of the network, each of the first {averaged} "
            "rounds; the fine-tuned model stays at the site"
        )

    def _weights_for(self, ask: Ask, state: PersonalState) -> dict[str, Arrays]:
        """Return the global weights for all that have no personal model yet."""
        personal = keepers(state, self.common)
        return {site: {} if site in personal else state.arrays for site in ask.sites}

    def _finetunes(self, state: State) -> bool:
        return state.round >= self.common.rounds - self.settings.finetune_rounds
