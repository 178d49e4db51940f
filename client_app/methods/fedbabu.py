"""FedBABU at a site: FedAvg+FT, whose shared rounds leave the last layer as it is."""

from __future__ import annotations

from fedsilo.client_app.methods.base import Lab, SiteNetwork
from fedsilo.client_app.methods.fedavg_ft import FedAvgFTSite
from fedsilo.models.networks.exchanged import last_layers


class FedBABUSite(FedAvgFTSite):
    """Trains the body, and all at the end."""

    def open(self, lab: Lab) -> SiteNetwork:
        """Open as FedAvg+FT does, with the head frozen while there is averaging."""
        network = super().open(lab)
        if lab.instruction.returns:
            head = set(last_layers(network, 1))
            for name, parameter in network.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and name not in head)
        return network
