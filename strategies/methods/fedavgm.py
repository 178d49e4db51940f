"""Methods whose server does more with FedAvg's mean: FedAvgM, the adaptive optimisers, and FedSWA.

Messages are FedAvg's. The server's own arrays, moments or a mean of models, are never sent.
"""

from dataclasses import replace

import numpy as np

from fedsilo.core.array_names import arrays_below, is_statistic
from fedsilo.core.messages import TRAIN
from fedsilo.models.methods.fedswa import FedSWASettings, running_mean
from fedsilo.strategies.loop.method import Arrays, Ask, State
from fedsilo.strategies.methods.fedavg import FedAvg

_MOMENTS = "moments/"  # the prefix of moments in the state, which the checkpoint stores


class FedAvgM(FedAvg):
    """Steps towards the mean with momentum; batch norm's statistics become the mean itself.

    The settings decide the step: the step of Hsu et al. 2019, or an adaptive one
    (``models.methods.fedadam``).
    """

    beside = (_MOMENTS,)

    def round(self, state: State, ask: Ask) -> State:
        """Average like FedAvg, then let the server's optimiser take one step towards the mean.

        The method's settings define the optimiser. It receives the difference mean - model and the
        previous moments. Its step is added to the model. Running statistics of batch norm become
        the mean. The new state also holds the new moments, as ``moments/<array>``.
        """
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


_MEAN = "mean/"  # the prefix of the mean in the state, which the checkpoint stores


class FedSWA(FedAvg):
    """Averages the sites' weights; in the last rounds it also averages the models of these rounds.

    Sites always train the newest model. The final evaluation measures the mean of the models.
    """

    settings: FedSWASettings
    beside = (_MEAN,)

    def round(self, state: State, ask: Ask) -> State:
        """Average like FedAvg, and in the run's last rounds also keep a mean of the global models.

        The mean has equal weights and covers the last 'averaged-rounds' rounds. The state stores it
        beside the newest model. Sites always receive the newest model.
        """
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
        """Return the newest global model until the run's last round is over, and then a mean.

        The mean is over the global models of the last 'averaged-rounds' rounds. ``round`` stores it
        in the state. If the state has no mean, the newest model is returned even after the last
        round.
        """
        mean = arrays_below(_MEAN, state.arrays)
        if mean and state.round >= self.common.rounds:
            return mean
        return super().model(state)
