"""MOON (Li, He and Song 2021): FedAvg whose sites keep away from their own last model.

Messages: to train, both ways, FedAvg's and the projection head as ``projection/<name>``, float32;
``evaluate`` brings the network alone, since the head plays no part in its answers. The contrastive
term is the sites' (``client_app/methods/moon.py``).
"""

from __future__ import annotations

import torch

from fedsilo.models.methods.moon import PROJECTION, MoonSettings, build_projection
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.initial_arrays import initial_weights
from fedsilo.strategies.loop.method import Disclosures, State
from fedsilo.strategies.methods.fedavg import FedAvg


class Moon(FedAvg):
    """Averages what all sites trained, the projection head with it."""

    settings: MoonSettings
    title = "MOON"
    beside = (PROJECTION,)  # so it is loaded as FedAvg's is

    def initial_state(self, task: Task) -> State:
        """Return the network's initial weights as FedAvg has them, and the head's."""
        with torch.device("meta"):  # only the width is wanted, no weight
            channels = build_classifier(self.common, task).channels
        head = initial_weights(build_projection(self.common.seed, channels, self.settings))
        named = {f"{PROJECTION}{name}": array for name, array in head.items()}
        return State({**super().initial_state(task).arrays, **named})

    def disclosures(self) -> Disclosures:
        """Name the weights and the head."""
        return super().disclosures().also("the projection head, trained, each round")
