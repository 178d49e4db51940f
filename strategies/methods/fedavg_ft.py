"""FedAvg with personal fine-tuning: FedAvg first, then each site continues alone.

Messages are FedAvg's until the last ``finetune-rounds``. The first of these sends the global
weights once more. After that no array crosses the wire, and the personal models stay at the sites.
"""

from fedsilo.core.messages import TRAIN
from fedsilo.core.settings.common_settings import AGGREGATIONS
from fedsilo.models.methods.fedavg_ft import FedAvgFTSettings
from fedsilo.strategies.loop.method import Arrays, Ask, Capabilities, Disclosures, State
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.methods.personal_models import PersonalState


class FedAvgFT(FedAvg):
    """Averages first, then lets each site fine-tune the average."""

    settings: FedAvgFTSettings
    # No paced epochs, because the server knows from a site's kept state that it fine-tunes
    capabilities = Capabilities(initial_weights=True, aggregations=AGGREGATIONS, updates=True)
    state_class = PersonalState

    def round(self, state: PersonalState, ask: Ask) -> State:
        """Average like FedAvg; in the last rounds let each site fine-tune its own model."""
        if self._finetunes(state):
            send = {site: self.model_for(site, state) for site in ask.sites}
            alone = ask(TRAIN, send, expect={})
            return state.with_keepers(alone)
        after: State = super().round(state, ask)
        return after

    def model_for(self, site: str, state: PersonalState) -> Arrays:
        """Return the global weights for a site without a personal model; else empty."""
        if site in state.personal:
            return {}
        return state.arrays

    def disclosures(self) -> Disclosures:
        """Describe the weights that leave in the rounds of FedAvg."""
        averaged = self.common.rounds - self.settings.finetune_rounds
        return Disclosures(
            f"all weights and batch-norm statistics of the network, each of the first {averaged} "
            "rounds; the fine-tuned model stays at the site"
        )

    def _finetunes(self, state: State) -> bool:
        return state.round >= self.common.rounds - self.settings.finetune_rounds
