"""Each silo alone, the baseline of every federated method.

Messages: an instruction to each site, metrics back. No array leaves a site; each starts from the
seed's initial weights, or from ``initial-weights``, which its first message brings as
``start/<name>``, and keeps its model on its own disk.
"""

from __future__ import annotations

from fedsilo.models.contract.messages import EVALUATE, TRAIN
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.ask import Ask
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.method import Method, State


class Local(Method):
    """Asks each site to train alone and collects metrics."""

    title = "Local"
    capabilities = Capabilities(paced_epochs=True, initial_weights=True)

    def initial_state(self, task: Task) -> State:
        """Return an empty state: the server holds no weights."""
        return State()

    def round(self, state: State, ask: Ask) -> State:
        """Have each site train, from what its user names at first."""
        ask(TRAIN, {site: self.start(site, ask) for site in ask.sites}, expect={})
        return state

    def evaluate(self, state: State, ask: Ask) -> None:
        """Have each site measure its own model."""
        ask(EVALUATE, {site: {} for site in ask.sites}, expect={})
