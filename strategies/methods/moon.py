"""MOON (Li, He and Song 2021): FedAvg whose sites keep away from their own previous model.

Training messages, both ways: FedAvg's, and the projection head as ``projection/<name>``, float32.
``evaluate`` sends only the network, because the head has no part in predictions. The sites compute
the contrastive term (``client_app/methods/moon.py``).
"""

from fedsilo.core.array_names import with_prefix
from fedsilo.models.methods.moon import PROJECTION, MoonSettings, build_projection
from fedsilo.strategies.loop.method import Disclosures, State, initial_weights
from fedsilo.strategies.methods.fedavg import FedAvg


class Moon(FedAvg):
    """Averages the trained networks, including the projection heads."""

    settings: MoonSettings
    beside = (PROJECTION,)  # not part of the model, so that it loads like FedAvg's

    def initial_state(self) -> State:
        """Return FedAvg's initial weights, and those of the projection head."""
        head = build_projection(self.common.seed, self.blueprint.channels)
        named = with_prefix(PROJECTION, initial_weights(head))
        return State(self.starting_weights() | named)

    def disclosures(self) -> Disclosures:
        """Describe the weights and the projection head."""
        return super().disclosures().also("the projection head, trained, each round")
