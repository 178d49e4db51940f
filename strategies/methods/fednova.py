"""FedNova at the server: messages are FedAvg's, with updates divided by steps, and ``steps``.

Only the sum of the divided updates is needed, so it can be a secret sum.
"""

import math
from dataclasses import replace

from fedsilo.core.messages import TRAIN
from fedsilo.core.settings.common_settings import SUMS
from fedsilo.models.methods.fednova import STEPS
from fedsilo.strategies.loop.method import Ask, Disclosures, Reply, State
from fedsilo.strategies.methods.fedavg import FedAvg


class FedNova(FedAvg):
    """Moves in the mean direction of one step, as far as the sites' mean number of steps."""

    def round(self, state: State, ask: Ask) -> State:
        """Average the updates per step, and multiply them by the mean number of steps."""
        model = state.arrays
        trained = ask(
            TRAIN, dict.fromkeys(ask.sites, model), metrics=[STEPS], fault=self.implausible_steps
        )
        steps = trained.mean_metric(STEPS)
        return replace(state, arrays=self.towards(trained, model, steps))

    def implausible_steps(self, reply: Reply) -> str | None:
        """Explain why a site with that many samples cannot take so many steps, or return None."""
        common, steps = self.common, reply.metrics[STEPS]
        # The last batch of an epoch may be small
        most = common.local_epochs * math.ceil(reply.examples / common.batch_size)
        if common.epoch_steps:
            most = common.pace or most
        elif common.local_steps:
            most = common.local_steps
        if 1 <= steps <= most:
            return None
        return f"metric '{STEPS}' is {steps:g}, not 1 to {most}"

    def disclosures(self) -> Disclosures:
        """Describe the weights and the number of steps."""
        steps = "the number of optimiser steps, each round"
        if self.common.trust == SUMS:
            steps += ", of which the server learns only the mean"
        return super().disclosures().also(steps)
