"""Each silo alone, the baseline of every federated method.

Messages: an instruction to each site, metrics back. No array leaves a site; each starts from the
seed's initial weights, or from ``initial-weights``, which its first message brings as
``start/<name>``, and keeps its model on its own disk.
"""

from fedsilo.models.contract.messages import TRAIN
from fedsilo.strategies.loop.method import Arrays, Ask, Capabilities, Disclosures, Method, State


class Local(Method):
    """Asks each site to train alone and collects metrics."""

    capabilities = Capabilities(paced_epochs=True, initial_weights=True)

    def round(self, state: State, ask: Ask) -> State:
        """Have each site train, from what its user names at first."""
        ask(TRAIN, {site: self.start(site, ask) for site in ask.sites}, expect={})
        return state

    def model_for(self, site: str, state: State) -> Arrays:
        """Return nothing: each site measures its own model."""
        return {}

    def disclosures(self) -> Disclosures:
        """Name nothing."""
        return Disclosures()
