"""FedBN (Li et al. 2021) as a method of your own, on digits: python own_method.py."""

from torch import nn

from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.models.networks.site_network import batch_norms
from fedsilo.strategies.methods.fedper import FedPer


class OwnFedBNSettings(NoSettings):
    """What stays at a silo."""

    def personal(self, network: nn.Module) -> list[str]:
        """Return the names of the arrays that stay: those of batch norms."""
        return batch_norms(network)


class OwnFedBN(FedPer):
    """Averages all other arrays; the silo's side is FedPer's."""


if __name__ == "__main__":
    from fedsilo import simulate

    simulate("fedbn-digits", plugin=__file__, settings={"method": "own_method", "rounds": 2})
