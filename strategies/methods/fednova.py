"""FedNova at the server; messages as FedAvg's, updates divided by steps, and ``steps`` with them.

A sum of divided updates is all that is wanted of them, so it can be a secret one.
"""

from dataclasses import replace

from fedsilo.models.contract.messages import TRAIN
from fedsilo.models.contract.settings import SUMS
from fedsilo.models.methods.fednova import STEPS
from fedsilo.strategies.loop.method import Ask, Disclosures, Reply, State
from fedsilo.strategies.methods.fedavg import FedAvg


class FedNova(FedAvg):
    """Steps as far as the sites did on average, in the mean direction of a step."""

    def round(self, state: State, ask: Ask) -> State:
        """Average the updates of a step, and take as many steps as sites took on average."""
        model = state.arrays
        trained = ask(
            TRAIN, dict.fromkeys(ask.sites, model), metrics=[STEPS], fault=self.implausible_steps
        )
        steps = trained.mean_metric(STEPS)
        return replace(state, arrays=self.towards(trained, model, steps))

    def implausible_steps(self, reply: Reply) -> str | None:
        """Say why no site with so many samples takes so many steps, if none does."""
        common, steps = self.common, reply.metrics[STEPS]
        most = common.local_epochs * -(-reply.examples // common.batch_size)
        most = (common.pace if common.epoch_steps else common.local_steps) or most
        if 1 <= steps <= most:
            return None
        return f"metric '{STEPS}' is {steps:g}, not 1 to {most}"

    def disclosures(self) -> Disclosures:
        """Name the weights and the steps."""
        mean = ", of which the server learns the mean alone" if self.common.trust == SUMS else ""
        return super().disclosures().also(f"the number of optimiser steps, each round{mean}")
