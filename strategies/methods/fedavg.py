"""FedAvg (McMahan et al. 2017): the mean of weights and float buffers, weighted by samples.

Messages, both ways: ``arrays`` holds every parameter and float buffer of the network by its
state-dict name, float32.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from fedsilo.core.array_names import is_statistic
from fedsilo.core.messages import TRAIN
from fedsilo.core.settings.common_settings import AGGREGATIONS
from fedsilo.strategies.loop.ask import Replies
from fedsilo.strategies.loop.method import Arrays, Ask, Capabilities, Disclosures, Method


class FedAvg(Method):
    """Averages the weights that all sites trained."""

    capabilities = Capabilities(
        paced_epochs=True,
        initial_weights=True,
        some_sites=True,
        aggregations=AGGREGATIONS,
        updates=True,
    )

    def initial_state(self) -> Any:
        """Return the network's initial weights, drawn from the seed."""
        return self.state_class(self.starting_weights())

    def round(self, state: Any, ask: Ask) -> Any:
        """Send the weights to all sites, let them train, and average the results."""
        trained = ask(TRAIN, dict.fromkeys(ask.sites, state.arrays))
        return replace(state, arrays=self.average(trained, state.arrays))

    def towards(self, replies: Replies, model: Arrays, rate: float) -> dict[str, Any]:
        """Move ``model`` by ``rate`` times the way to the mean of the replies.

        A rate of 1 gives the mean. Batch norm's running statistics always become the mean.
        """
        after = self.average(replies, model)
        if rate == 1:
            return after  # the bits of the mean itself
        for name, mean in after.items():
            if not is_statistic(name):
                old = model[name].astype(np.float64)
                after[name] = np.asarray(old + rate * (mean - old), np.float32)
        return after

    def disclosures(self) -> Disclosures:
        """Describe the weights."""
        what = "all weights and batch-norm statistics of the network, each round"
        if self.common.secure_aggregation == "none":
            return Disclosures(what)
        return Disclosures(
            f"{what}, clipped and masked: of them the server learns the mean over all sites alone",
            "keys for masks and shares of keys that others can open, each round",
        )
