"""Star at a silo: start from the mean of all, train, send."""

from torch import Tensor

from fedsilo.client_app.methods.base import Lab
from fedsilo.client_app.methods.decentralised import DecentralisedSite, own_model
from fedsilo.models.methods.decentralised import MODEL


class StarSite(DecentralisedSite):
    """Starts each round from the received model."""

    def _start(self, lab: Lab) -> dict[str, Tensor]:
        return lab.arrays(MODEL) or own_model(lab)
