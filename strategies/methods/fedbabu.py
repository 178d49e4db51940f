"""FedBABU at the server: FedAvg+FT with a fixed head, which sites receive but never return.

So neither differential privacy's noise nor a site's reply can change the head.
"""

from dataclasses import replace
from typing import Any

from fedsilo.core.errors import SettingError
from fedsilo.core.messages import TRAIN
from fedsilo.models.networks.site_network import last_layers
from fedsilo.strategies.loop.method import Ask, Disclosures, State
from fedsilo.strategies.methods.fedavg_ft import FedAvgFT
from fedsilo.strategies.methods.personal_models import PersonalState


class FedBABU(FedAvgFT):
    """Averages bodies, then lets each site fine-tune."""

    def initial_state(self) -> Any:
        """Return the network's initial weights.

        Raises:
            SettingError: the network has no trained layer besides its head.
        """
        head = last_layers(self.blueprint, 1)
        trained = set()
        for name, parameter in self.blueprint.named_parameters():
            if parameter.requires_grad:
                trained.add(name)
        if trained <= set(head):
            raise SettingError(
                "fedbabu trains all but the last layer, and this network has no other: choose "
                "another 'network.name'"
            )
        return super().initial_state()

    def round(self, state: PersonalState, ask: Ask) -> State:
        """Average bodies; in the last rounds let each site fine-tune its own model."""
        if self._finetunes(state):
            return super().round(state, ask)
        body = dict(state.arrays)
        for name in last_layers(self.blueprint, 1):
            body.pop(name, None)
        send = dict.fromkeys(ask.sites, state.arrays)
        trained = ask(TRAIN, send, reference=dict.fromkeys(ask.sites, body))
        return replace(state, arrays={**state.arrays, **self.average(trained, body)})

    def disclosures(self) -> Disclosures:
        """Describe the weights without the head."""
        (said,) = super().disclosures().leaves
        head = f"of the network but for {', '.join(last_layers(self.blueprint, 1))}"
        return Disclosures(said.replace("of the network", head))
