"""MOON (Li, He and Song 2021): FedAvg whose sites keep away from their own last model.

Messages: to train, both ways, FedAvg's and the projection head as ``projection/<name>``, float32;
``evaluate`` brings the network alone, since the head plays no part in its answers. The contrastive
term is the sites' (``client_app/methods/moon.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedsilo.models.contract.messages import EVALUATE
from fedsilo.models.methods.moon import PROJECTION, MoonSettings, build_projection
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.initial_arrays import initial_weights
from fedsilo.strategies.loop.reporting import Disclosures
from fedsilo.strategies.loop.state import RoundState
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.wire.records import NDArray


class Moon(FedAvg):
    """Averages what all sites trained, the projection head with it."""

    settings: MoonSettings
    title = "MOON"

    def disclosures(self) -> Disclosures:
        """Name the weights and the head."""
        return Disclosures(
            *super().disclosures().leaves, "the projection head, trained, each round"
        )

    def initial_state(self, task: Task) -> RoundState:
        """Return the network's initial weights as FedAvg has them, and the head's."""
        with torch.device("meta"):  # only the width is wanted, no weight
            channels = build_classifier(self.common, task).channels
        head = initial_weights(build_projection(self.common.seed, channels, self.settings))
        named = {f"{PROJECTION}{name}": array for name, array in head.items()}
        start = super().initial_state(task)
        return RoundState(0, {**start.arrays, **named}, start.extras)

    def outgoing(self, phase: str, site: str, state: RoundState) -> Mapping[str, NDArray]:
        """Return the weights; the head only to train."""
        return self.model(state) if phase == EVALUATE else state.arrays

    def model(self, state: RoundState) -> Mapping[str, NDArray]:
        """Return the network alone: it is loaded as FedAvg's is."""
        return {n: array for n, array in state.arrays.items() if not n.startswith(PROJECTION)}
