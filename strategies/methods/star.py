"""Star: client and server, as FedEFM compares it: after a round every silo has the mean of all.

Messages down: ``model/<array>``, Theta, in every round; up: the silo's trained arrays. It is FedAvg
with the same weight for each silo, put beside the topologies: its mixing matrix is J, all 1 / n,
and its cycle takes the two hops that it makes. A hub that is a silo itself, among which models are
mixed by Metropolis weights, is the topology ``hub``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedsilo.models.contract.notes import Notes
from fedsilo.models.contract.settings import AGGREGATIONS
from fedsilo.models.methods.decentralised import LinkSettings
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.reporting import Disclosures
from fedsilo.strategies.loop.state import RoundState, SiteReply
from fedsilo.strategies.methods.decentralised import Decentralised
from fedsilo.strategies.wire.records import NDArray


class Star(Decentralised):
    """Averages what all silos trained, and sends the mean to all."""

    settings: LinkSettings
    title = "Star"
    capabilities = Capabilities(initial_weights=True, aggregations=AGGREGATIONS)

    def kind(self) -> str:
        """Return the topology with the server in the middle."""
        return "star"

    def disclosures(self) -> Disclosures:
        """Name the weights; no silo sees another's."""
        return Disclosures(
            "all weights and batch-norm statistics of the silo's own model, each round, "
            f"{self.as_sent()}; their mean over all silos goes to all silos"
        )

    def relayed(self, phase: str, site: str, state: RoundState) -> dict[str, NDArray]:
        """Return nothing: silos get the mean alone."""
        return {}

    def notes(self, phase: str, site: str, state: RoundState) -> Notes:
        """Return none: there is nothing to mix."""
        return Notes()

    def reference(self, phase: str, site: str, state: RoundState) -> Mapping[str, NDArray]:
        """Return Theta: each silo goes on from it."""
        return self.model(state)

    def kept_models(
        self, names: Iterable[str], state: RoundState, replies: Mapping[str, SiteReply]
    ) -> dict[str, NDArray]:
        """Return none: silos get the mean alone."""
        return {}

    def _needs_theta(self, site: str, state: RoundState) -> bool:
        return True
