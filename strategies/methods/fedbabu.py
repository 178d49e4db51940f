"""FedBABU at the server: FedAvg+FT's rounds; the head that is averaged never moved."""

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.networks.exchanged import last_layers
from fedsilo.strategies.methods.fedavg_ft import FedAvgFT
from fedsilo.strategies.methods.personal_models import PersonalState


class FedBABU(FedAvgFT):
    """Averages bodies, then lets each site fine-tune."""

    def initial_state(self) -> PersonalState:
        """Return the network's initial weights; SettingError if it is a head alone."""
        head = set(last_layers(self.blueprint, 1))
        trained = [name for name, p in self.blueprint.named_parameters() if p.requires_grad]
        if head.issuperset(trained):
            raise SettingError(
                "fedbabu trains all but the last layer, and this network has no other: choose "
                "another 'network'"
            )
        state: PersonalState = super().initial_state()
        return state
