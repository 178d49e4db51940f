"""FedProx at a site: FedAvg with a proximal term in the loss."""

from __future__ import annotations

from torch import Tensor

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.base import Answer, SiteMethod
from fedsilo.client_app.training.loop import Penalty
from fedsilo.models.methods.fedprox import FedProxSettings, proximal_term
from fedsilo.models.networks.site_network import SiteNetwork


class FedProxSite(SiteMethod):
    """Trains near the weights that came."""

    settings: FedProxSettings

    def train(self, lab: Lab) -> Answer:
        """Train the global model on this silo, near where it was."""
        network = lab.open()
        lab.measure(network)
        lab.fit(network, penalty=proximal(network, self.settings.proximal_mu))
        return lab.reply(network)


def proximal(network: SiteNetwork, mu: float) -> Penalty:
    """Return the proximal term around the weights that ``network`` has now."""
    trained = network.parameters()
    weights = [weight for weight in trained if weight.requires_grad]  # not a ViT's 22 million
    anchors = [weight.detach().clone() for weight in weights]

    def term() -> Tensor:
        return proximal_term(mu, weights, anchors)

    return term
