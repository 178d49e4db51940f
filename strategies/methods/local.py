"""Each silo alone, the baseline of every federated method.

Messages: an instruction to each site, metrics back. No array leaves a site; each starts from the
seed's initial weights, or from ``initial-weights``, which its first message brings as
``start/<name>``, and keeps its model on its own disk.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedsilo.models.contract.messages import EVALUATE
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.loop.state import ArraySpec, RoundState, SiteReply
from fedsilo.strategies.wire.records import NDArray


class Local(Method):
    """Asks each site to train alone and collects metrics."""

    title = "Local"
    capabilities = Capabilities(paced_epochs=True, initial_weights=True)

    def initial_state(self, task: Task) -> RoundState:
        """Return an empty state: the server holds no weights."""
        return RoundState(0, {})

    def outgoing(self, phase: str, site: str, state: RoundState) -> Mapping[str, NDArray]:
        """Return what a site starts from, if the user names it."""
        return {} if phase == EVALUATE else self.start(site, state)

    def expected(self, phase: str, site: str, state: RoundState) -> Mapping[str, ArraySpec]:
        """Expect no arrays."""
        return {}

    def combine(
        self, phase: str, state: RoundState, replies: Mapping[str, SiteReply]
    ) -> RoundState:
        """Return the state as it was."""
        return state
