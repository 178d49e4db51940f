"""Star at a silo: start each round from the mean of all silos' models, train it and send it."""

from torch import Tensor

from fedsilo.client_app.methods.base import Lab
from fedsilo.client_app.methods.decentralised import DecentralisedSite, own_model
from fedsilo.models.methods.decentralised import MODEL


class StarSite(DecentralisedSite):
    """Starts each round from the received model."""

    trains_stacked = True

    def _start(self, lab: Lab) -> dict[str, Tensor]:
        return lab.arrays(MODEL) or own_model(lab)
