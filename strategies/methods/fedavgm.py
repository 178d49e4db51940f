"""FedAvgM at the server (Hsu et al. 2019): messages are FedAvg's; moments are never sent."""

from dataclasses import replace

import numpy as np

from fedsilo.core.array_names import is_statistic
from fedsilo.core.messages import TRAIN
from fedsilo.strategies.loop.method import Ask, State
from fedsilo.strategies.methods.fedavg import FedAvg

_MOMENTS = "moments/"  # the prefix of moments in the state, which the checkpoint stores


class FedAvgM(FedAvg):
    """Steps towards the mean with momentum; batch norm's statistics become the mean itself."""

    beside = (_MOMENTS,)

    def round(self, state: State, ask: Ask) -> State:
        """Average like FedAvg, then take the settings' step from the model towards the mean."""
        model = self.model(state)
        trained = ask(TRAIN, dict.fromkeys(ask.sites, model))
        mean = self.average(trained, model)
        after = dict(mean)
        for name, array in mean.items():
            if is_statistic(name):
                continue
            old = model[name].astype(np.float64)
            moment = state.arrays.get(f"{_MOMENTS}{name}")  # None before the first step
            step, moment = self.settings.step(array - old, moment)
            after[name] = np.asarray(old + step, np.float32)
            after[f"{_MOMENTS}{name}"] = np.asarray(moment, np.float32)
        return replace(state, arrays=after)
