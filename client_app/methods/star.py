"""Star at a silo: go on from the mean of all, train, send."""

from __future__ import annotations

from torch import Tensor

from fedsilo.client_app.methods.decentralised import DecentralisedSite


class StarSite(DecentralisedSite):
    """Starts each round from what the server sent."""

    def start(self) -> dict[str, Tensor]:
        """Return the mean of all silos' models."""
        return self.theta() or self.own_model()
