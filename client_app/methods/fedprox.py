"""FedProx at a site: FedAvg with a proximal term in the loss."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedsilo.client_app.methods.fedavg import FedAvgSite
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.models.methods.fedprox import FedProxSettings, proximal_term
from fedsilo.models.networks.site_network import SiteNetwork


class FedProxSite(FedAvgSite):
    """Trains near the weights that came."""

    settings: FedProxSettings

    def local_training(self, network: SiteNetwork) -> LocalTraining:
        """Add the proximal term around the weights that ``network`` has now."""
        trained = network.parameters()
        weights = [weight for weight in trained if weight.requires_grad]  # not a ViT's 22 million
        anchors = [weight.detach().clone() for weight in weights]

        def term() -> Tensor:
            return proximal_term(self.settings.proximal_mu, weights, anchors)

        return replace(super().local_training(network), penalty=term)
