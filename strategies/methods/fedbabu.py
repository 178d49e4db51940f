"""FedBABU at the server: FedAvg+FT's rounds; the head that is averaged never moved."""

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.networks.exchanged import last_layers
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.initial_arrays import starting_network
from fedsilo.strategies.methods.fedavg_ft import FedAvgFT
from fedsilo.strategies.methods.personal_models import PersonalState


class FedBABU(FedAvgFT):
    """Averages bodies, then lets each site fine-tune."""

    title = "FedBABU"

    def initial_state(self, task: Task) -> PersonalState:
        """Return the network's initial weights; SettingError if it is a head alone."""
        network = starting_network(self.common, task)
        head = set(last_layers(network, 1))
        if all(name in head for name, p in network.named_parameters() if p.requires_grad):
            raise SettingError(
                "fedbabu trains all but the last layer, and this network has no other: choose "
                "another 'network'"
            )
        return super().initial_state(task)
