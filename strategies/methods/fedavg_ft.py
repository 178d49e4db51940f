"""FedAvg with personal fine-tuning: FedAvg, then each site continues alone.

Messages as FedAvg's until the last ``finetune-rounds``; in the first of those the global weights go
out once more, and from then on no array crosses the wire: the personal models stay at the sites.
"""

from fedsilo.models.contract.messages import TRAIN
from fedsilo.models.contract.settings import AGGREGATIONS
from fedsilo.models.methods.fedavg_ft import FedAvgFTSettings
from fedsilo.strategies.loop.method import Arrays, Ask, Capabilities, Disclosures, State
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.methods.personal_models import PersonalState


class FedAvgFT(FedAvg):
    """Averages, then lets each site fine-tune the average."""

    settings: FedAvgFTSettings
    # No paced epochs: by what a site keeps the server knows that it fine-tunes
    capabilities = Capabilities(initial_weights=True, aggregations=AGGREGATIONS, updates=True)
    state_class = PersonalState

    def round(self, state: PersonalState, ask: Ask) -> State:
        """Average as FedAvg does; in the last rounds have each site fine-tune its own model."""
        if self._finetunes(state):
            send = {site: self.model_for(site, state) for site in ask.sites}
            alone = ask(TRAIN, send, expect={})
            return state.with_keepers(alone)
        after: State = super().round(state, ask)
        return after

    def model_for(self, site: str, state: PersonalState) -> Arrays:
        """Return the global weights for a site that has no personal model yet."""
        return {} if site in state.personal else state.arrays

    def disclosures(self) -> Disclosures:
        """Name the weights, of the rounds of FedAvg."""
        averaged = self.common.rounds - self.settings.finetune_rounds
        return Disclosures(
            f"all weights and batch-norm statistics of the network, each of the first {averaged} "
            "rounds; the fine-tuned model stays at the site"
        )

    def _finetunes(self, state: State) -> bool:
        return state.round >= self.common.rounds - self.settings.finetune_rounds
