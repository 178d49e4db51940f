"""Cyclic weight transfer: the messages are FedAvg's, but go to one silo after another.

A round is a lap that visits each silo once, in an order drawn from the seed and the round.
"""

from dataclasses import replace

import numpy as np

from fedsilo.core.messages import TRAIN
from fedsilo.core.seeding import derive_seed
from fedsilo.strategies.loop.method import Ask, Capabilities, Disclosures, State
from fedsilo.strategies.methods.fedavg import FedAvg


class Cyclic(FedAvg):
    """Passes the model from silo to silo."""

    capabilities = Capabilities(paced_epochs=True, initial_weights=True, some_sites=True)

    def round(self, state: State, ask: Ask) -> State:
        """Let each silo train the model that the silo before it returned."""
        seed = derive_seed(self.common.seed, "cycle", state.round + 1)
        for site in np.random.default_rng(seed).permutation(ask.sites).tolist():
            trained = ask(TRAIN, {site: state.arrays})
            state = replace(state, arrays=dict(trained[site].arrays))
        return state

    def disclosures(self) -> Disclosures:
        """Describe the weights, which the next silo receives unchanged."""
        return Disclosures(
            "all weights and batch-norm statistics of the network as this site trained it, each "
            "round, to the server and one other site"
        )
