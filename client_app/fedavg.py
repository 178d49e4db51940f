"""FedAvg at a site (McMahan et al. 2017): train the global model, send all of it back."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from client_app.base import SiteMethod
from client_app.evaluation import SiteNetwork
from models.networks import ImageClassifier, build_classifier, exchanged_arrays, load_exchanged


class FedAvgSite(SiteMethod):
    """Receives and returns every parameter and float buffer of the network."""

    def open_network(self) -> SiteNetwork:
        """Build the network and load the global weights."""
        network = build_classifier(self.common, self.silo.task)
        load_exchanged(network, self.request.arrays())
        return cast(ImageClassifier, self.compute.place(network))

    def outgoing(self, network: SiteNetwork) -> dict[str, Tensor]:
        """Return all trained weights."""
        return exchanged_arrays(cast(nn.Module, network))
