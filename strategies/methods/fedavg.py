"""FedAvg (McMahan et al. 2017): the n_k-weighted mean of weights and float buffers.

Messages, both ways: ``arrays`` holds every parameter and float buffer of the network by its
state-dict name, float32.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedsilo.models.contract.settings import AGGREGATIONS
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.initial_arrays import initial_weights, starting_network
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.loop.reporting import Disclosures
from fedsilo.strategies.loop.state import ArraySpec, RoundState, SiteReply


class FedAvg(Method):
    """Averages what all sites trained."""

    title = "FedAvg"
    capabilities = Capabilities(
        paced_epochs=True,
        initial_weights=True,
        some_sites=True,
        aggregations=AGGREGATIONS,
        secure=True,
    )

    def disclosures(self) -> Disclosures:
        """Name the weights."""
        what = "all weights and batch-norm statistics of the network, each round"
        if self.common.secure_aggregation == "none":
            return Disclosures(what)
        return Disclosures(
            f"{what}, clipped and masked: of them the server learns the mean over all sites alone, "
            "if it follows the protocol",
            "keys for masks and shares of keys that others can open, each round",
        )

    def initial_state(self, task: Task) -> RoundState:
        """Return the network's initial weights, keyed on the seed."""
        return RoundState(0, initial_weights(starting_network(self.common, task)))

    def expected(self, phase: str, site: str, state: RoundState) -> Mapping[str, ArraySpec]:
        """Expect what was sent, trained."""
        sent = self.outgoing(phase, site, state)
        return {name: ArraySpec(array.shape) for name, array in sent.items()}

    def combine(
        self, phase: str, state: RoundState, replies: Mapping[str, SiteReply]
    ) -> RoundState:
        """Return the mean, n_k-weighted unless 'aggregation' says otherwise."""
        return RoundState(state.round, self.average(replies, state.arrays), state.extras)
