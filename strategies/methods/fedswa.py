"""FedSWA at the server: messages are FedAvg's; at the end the mean of models is measured."""

from dataclasses import replace

import numpy as np

from fedsilo.core.array_names import arrays_below
from fedsilo.models.methods.fedswa import FedSWASettings, running_mean
from fedsilo.strategies.loop.method import Arrays, Ask, State
from fedsilo.strategies.methods.fedavg import FedAvg

_MEAN = "mean/"  # the prefix of the mean in the state, which the checkpoint stores


class FedSWA(FedAvg):
    """Averages sites, and in the last rounds also its own models."""

    settings: FedSWASettings
    beside = (_MEAN,)

    def round(self, state: State, ask: Ask) -> State:
        """Average like FedAvg from the last model; in the last rounds update a mean of models."""
        last, mean = super().model(state), arrays_below(_MEAN, state.arrays)
        after: State = super().round(replace(state, arrays=last), ask)
        # The number of models in the mean so far; below 0 while averaging has not begun
        before = state.round - self.common.rounds + self.settings.averaged_rounds
        if before < 0:
            return after
        arrays = dict(after.arrays)
        for name, array in after.arrays.items():
            new_mean = running_mean(mean.get(name, 0.0), array, before)
            arrays[f"{_MEAN}{name}"] = np.asarray(new_mean, np.float32)
        return replace(after, arrays=arrays)

    def model(self, state: State) -> Arrays:
        """Return the mean of models after the last round; before it, the last model."""
        mean = arrays_below(_MEAN, state.arrays)
        if mean and state.round >= self.common.rounds:
            return mean
        return super().model(state)
