"""The ensemble: each silo trains alone, and all models' probabilities are averaged.

Messages: nothing but instructions until the last round, whose reply holds the site's weights by
state-dict name; the final evaluation carries all of them, ``expert/<site>/<array>``, to all.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedsilo.models.contract.messages import EVALUATE
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.loop.reporting import Disclosures
from fedsilo.strategies.loop.state import ArraySpec, RoundState, SiteReply
from fedsilo.strategies.methods.experts import collected_experts, expert_specs
from fedsilo.strategies.wire.records import NDArray


class Ensemble(Method):
    """Collects the sites' own models once."""

    title = "Ensemble"
    # Mixed probabilities are no alpha
    capabilities = Capabilities(vit=False, paced_epochs=True, evidence=False, initial_weights=True)

    def disclosures(self) -> Disclosures:
        """Name the weights."""
        return Disclosures(
            "once, after the last round: all weights and batch-norm statistics of the site's own "
            "model, which go to all other sites"
        )

    def initial_state(self, task: Task) -> RoundState:
        """Return an empty state: the server holds no weights until the end."""
        return RoundState(0, {})

    def outgoing(self, phase: str, site: str, state: RoundState) -> Mapping[str, NDArray]:
        """Return all experts at the end, before that what a site starts from."""
        return state.arrays if phase == EVALUATE else self.start(site, state)

    def expected(self, phase: str, site: str, state: RoundState) -> Mapping[str, ArraySpec]:
        """Expect the expert in the last round."""
        last = state.round + 1 == self.common.rounds
        return expert_specs(self.common, self.participants.task()) if last else {}

    def combine(
        self, phase: str, state: RoundState, replies: Mapping[str, SiteReply]
    ) -> RoundState:
        """Return the experts, once they are there."""
        names = self.expected(phase, "", state)
        return RoundState(state.round, collected_experts(replies, names), state.extras)
