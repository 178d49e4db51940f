"""FedSWA at the server; messages as FedAvg's until the end, when the mean is measured."""

from dataclasses import replace

import numpy as np

from fedsilo.models.contract.array_names import arrays_below, with_prefix
from fedsilo.models.methods.fedswa import FedSWASettings, running_mean
from fedsilo.strategies.loop.method import Arrays, Ask, State
from fedsilo.strategies.methods.fedavg import FedAvg

_MEAN = "mean/"  # mean/<array>: kept in the state, so in the checkpoint


class FedSWA(FedAvg):
    """Averages sites, and in the last rounds its own models."""

    settings: FedSWASettings
    beside = (_MEAN,)

    def round(self, state: State, ask: Ask) -> State:
        """Average as FedAvg does, from the last model; in the last rounds keep a mean of models."""
        last, mean = super().model(state), arrays_below(_MEAN, state.arrays)
        after: State = super().round(replace(state, arrays=last), ask)
        before = state.round - self.common.rounds + self.settings.averaged_rounds
        if before < 0:
            return after
        means = {
            name: np.asarray(running_mean(mean.get(name, 0.0), array, before), np.float32)
            for name, array in after.arrays.items()
        }
        return replace(after, arrays={**after.arrays, **with_prefix(_MEAN, means)})

    def model(self, state: State) -> Arrays:
        """Return the mean after the last round, before it the last model, which is measured."""
        mean = arrays_below(_MEAN, state.arrays) if state.round >= self.common.rounds else {}
        return mean or super().model(state)
