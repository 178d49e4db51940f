"""Each silo trains alone: the baseline of every federated method.

Messages: an instruction to each site, and metrics back. No array leaves a site. Each site starts
from the seed's initial weights, or from ``initial-weights``, which its first message holds as
``start/<name>``, and keeps its model on its own disk.
"""

from fedsilo.core.messages import TRAIN
from fedsilo.strategies.loop.method import Arrays, Ask, Capabilities, Disclosures, Method, State


class Local(Method):
    """Lets each site train alone and collects metrics."""

    capabilities = Capabilities(paced_epochs=True, initial_weights=True)

    def round(self, state: State, ask: Ask) -> State:
        """Let each site train; its first message may hold initial weights."""
        send = {site: self.start(site, ask) for site in ask.sites}
        ask(TRAIN, send, expect={})
        return state

    def model_for(self, site: str, state: State) -> Arrays:
        """Return no arrays, because each site measures its own model."""
        return {}

    def disclosures(self) -> Disclosures:
        """Return no sentences, because nothing leaves a site."""
        return Disclosures()
