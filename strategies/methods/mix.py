"""Mix, an oracle: one site of a simulation trains on the training data of all.

Messages as FedAvg's, but only the trainer answers with weights. ``note.sites`` names the sites
whose data it pools. In a deployment it is refused: no hospital could do it.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import EVALUATE
from fedsilo.models.contract.notes import Notes
from fedsilo.models.methods.mix import PoolNotes
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.reporting import Disclosures
from fedsilo.strategies.loop.state import ArraySpec, RoundState, SiteReply
from fedsilo.strategies.methods.fedavg import FedAvg


class Mix(FedAvg):
    """Lets the first site train on everything."""

    title = "Mix (oracle)"
    # One vector of all patients: no site's part of it is bounded
    capabilities = Capabilities(privacy=False, paced_epochs=True, initial_weights=True)

    def disclosures(self) -> Disclosures:
        """Say that this is no federated method."""
        return Disclosures(
            "everything: the oracle reads the training data of all sites (simulation only)"
        )

    def initial_state(self, task: Task) -> RoundState:
        """Return initial weights.

        Raises:
            SettingError: a site is a real one.
        """
        if real := [site for site, facts in self.participants.facts.items() if not facts.simulated]:
            raise SettingError(
                f"method 'mix' pools the data of all sites, and {', '.join(real)} are no simulated "
                "sites: choose a federated method"
            )
        return super().initial_state(task)

    def notes(self, phase: str, site: str, state: RoundState) -> Notes:
        """Name the sites whose data are pooled."""
        return Notes() if phase == EVALUATE else PoolNotes(tuple(self.participants.sites()))

    def expected(self, phase: str, site: str, state: RoundState) -> Mapping[str, ArraySpec]:
        """Expect weights of the trainer alone."""
        return super().expected(phase, site, state) if site == self._trainer() else {}

    def combine(
        self, phase: str, state: RoundState, replies: Mapping[str, SiteReply]
    ) -> RoundState:
        """Return the trainer's weights, or the state as it was if it failed."""
        trained = {site: reply for site, reply in replies.items() if site == self._trainer()}
        return super().combine(phase, state, trained) if trained else state

    def _trainer(self) -> str:
        return self.participants.sites()[0]
