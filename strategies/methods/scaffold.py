"""SCAFFOLD at the server: FedAvg's messages, and ``control/<array>`` for each trained array."""

from dataclasses import replace

import numpy as np

from fedsilo.core.array_names import arrays_below, is_statistic, with_prefix
from fedsilo.core.messages import TRAIN
from fedsilo.models.methods.scaffold import CONTROL, SCAFFOLDSettings
from fedsilo.strategies.loop.method import Ask, Disclosures, State
from fedsilo.strategies.methods.fedavg import FedAvg


class SCAFFOLD(FedAvg):
    """Averages weights and control variates."""

    settings: SCAFFOLDSettings
    beside = (CONTROL,)

    def initial_state(self) -> State:
        """Return the network's initial weights, and zero control variates."""
        model = self.starting_weights()
        controls = {}
        for name, array in model.items():
            if not is_statistic(name):
                controls[f"{CONTROL}{name}"] = np.zeros_like(array)
        return State(model | controls)

    def round(self, state: State, ask: Ask) -> State:
        """Step towards the mean weights, and move c by the mean change at replying sites."""
        model, controls = self.model(state), arrays_below(CONTROL, state.arrays)
        send = dict.fromkeys(ask.sites, state.arrays)
        before = dict.fromkeys(ask.sites, model)
        trained = ask(TRAIN, send, expect=send, reference=before)
        after = self.towards(trained, model, self.settings.server_learning_rate)
        # c moves only by the share of sites that replied, as the others' variates are unchanged
        moved = self.average(trained, with_prefix(CONTROL, controls))
        share = self.share(trained)
        for name, control in controls.items():
            after[f"{CONTROL}{name}"] = control + share * (moved[f"{CONTROL}{name}"] - control)
        return replace(state, arrays=after)

    def disclosures(self) -> Disclosures:
        """Describe the weights and the control variates."""
        what = "the mean gradient of the round's steps, with the weights and protected as they are"
        return super().disclosures().also(what)
