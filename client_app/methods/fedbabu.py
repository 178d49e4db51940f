"""FedBABU at a site: FedAvg+FT, whose shared rounds train and send all but the last layer."""

from fedsilo.client_app.methods.base import Lab, Outgoing, SiteNetwork
from fedsilo.client_app.methods.fedavg_ft import FedAvgFTSite
from fedsilo.models.networks.site_network import exchanged_arrays, last_layers


class FedBABUSite(FedAvgFTSite):
    """Trains and sends all layers but the last. In fine-tuning rounds all layers are trained."""

    trains_stacked = True

    def train_shared(self, lab: Lab, network: SiteNetwork) -> Outgoing:
        """Train and send the body, which is all layers but the last.

        The last layer keeps the weights that it has in ``network``, and is not sent. It remains
        frozen after this training. The result also holds the whole network, to be measured again.
        """
        head = set(last_layers(network, 1))
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name not in head)
        lab.fit(network)
        body = {n: array for n, array in exchanged_arrays(network).items() if n not in head}
        return Outgoing(network, send=body)
