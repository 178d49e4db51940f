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
        after = self.average(trained, model)
        for name in [n for n in after if not is_statistic(n)]:
            old, key = model[name].astype(np.float64), f"{_MOMENTS}{name}"
            moments = [state.arrays[key].astype(np.float64)] if key in state.arrays else []
            step, moment = self.settings.step(after[name] - old, *moments)
            after[name], after[key] = (np.asarray(a, np.float32) for a in (old + step, moment))
        return replace(state, arrays=after)
