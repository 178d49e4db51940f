"""FedDyn at the server: messages are FedAvg's; h is never sent."""

from dataclasses import replace

import numpy as np

from fedsilo.core.array_names import is_statistic
from fedsilo.core.messages import TRAIN
from fedsilo.models.methods.feddyn import FedDynSettings
from fedsilo.strategies.loop.method import Ask, State
from fedsilo.strategies.methods.fedavg import FedAvg

_H = "h/"  # the prefix of h in the state, which the checkpoint stores


class FedDyn(FedAvg):
    """Averages, and then moves past the mean to correct the sites' drift."""

    settings: FedDynSettings
    beside = (_H,)

    def round(self, state: State, ask: Ask) -> State:
        """Average like FedAvg; h = h - alpha share (mean - model), and model = mean - h / alpha."""
        model, alpha = self.model(state), self.settings.regularisation_alpha
        trained = ask(TRAIN, dict.fromkeys(ask.sites, model))
        mean = self.average(trained, model)
        after = dict(mean)
        for name, averaged in mean.items():
            if is_statistic(name):
                continue
            moved = averaged.astype(np.float64) - model[name]
            # Sites that did not reply did not move, so their part of h stays
            h = state.arrays.get(f"{_H}{name}", 0.0) - alpha * self.share(trained) * moved
            after[name] = np.asarray(averaged - h / alpha, np.float32)
            after[f"{_H}{name}"] = np.asarray(h, np.float32)
        return replace(state, arrays=after)
