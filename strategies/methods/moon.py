"""MOON (Li, He and Song 2021): FedAvg whose sites keep away from their own last model.

Messages: to train, both ways, FedAvg's and the projection head as ``projection/<name>``, float32;
``evaluate`` brings the network alone, since the head plays no part in its answers. The contrastive
term is the sites' (``client_app/methods/moon.py``).
"""

from fedsilo.models.contract.array_names import with_prefix
from fedsilo.models.methods.moon import PROJECTION, MoonSettings, build_projection
from fedsilo.strategies.loop.method import Disclosures, State, initial_weights
from fedsilo.strategies.methods.fedavg import FedAvg


class Moon(FedAvg):
    """Averages what all sites trained, the projection head with it."""

    settings: MoonSettings
    beside = (PROJECTION,)  # so it is loaded as FedAvg's is

    def initial_state(self) -> State:
        """Return the network's initial weights as FedAvg has them, and the head's."""
        head = build_projection(self.common.seed, self.blueprint.channels)
        named = with_prefix(PROJECTION, initial_weights(head))
        return State(self.starting_weights() | named)

    def disclosures(self) -> Disclosures:
        """Name the weights and the head."""
        return super().disclosures().also("the projection head, trained, each round")
