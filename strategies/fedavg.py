"""FedAvg (McMahan et al. 2017): the n_k-weighted mean of weights and float buffers.

Messages, both ways: ``arrays`` holds every parameter and float buffer of the network by its
state-dict name, float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from models.networks import Task, build_classifier, exchanged_arrays
from models.settings import CommonSettings
from strategies.averaging import weighted_mean
from strategies.base import FederatedStrategy
from strategies.state import ArraySpec, NDArray, RoundState, SiteReply


class FedAvg(FederatedStrategy):
    """Averages what all sites trained."""

    title = "FedAvg"
    leaves = "all weights and batch-norm statistics of the network, each round"
    # UEFL paper, table 3
    published: ClassVar[Mapping[str, Mapping[str, Mapping[str, float]]]] = {
        "mnist": {
            "D1": {"accuracy": 0.874, "entropy": 0.212},
            "D2": {"accuracy": 0.848, "entropy": 0.231},
            "D3": {"accuracy": 0.618, "entropy": 0.377},
            "all": {"accuracy": 0.780, "entropy": 0.273},
        },
        "fmnist": {
            "D1": {"accuracy": 0.801, "entropy": 0.246},
            "D2": {"accuracy": 0.825, "entropy": 0.232},
            "D3": {"accuracy": 0.784, "entropy": 0.341},
            "all": {"accuracy": 0.803, "entropy": 0.273},
        },
    }

    def initial_state(self, task: Task) -> RoundState:
        """Return the network's initial weights, keyed on the seed."""
        return RoundState(0, initial_weights(self.common, task))

    def expected(self, phase: str, site: str, state: RoundState) -> Mapping[str, ArraySpec]:
        """Expect what was sent, trained."""
        return {name: ArraySpec(array.shape) for name, array in state.arrays.items()}

    def combine(
        self, phase: str, state: RoundState, replies: Mapping[str, SiteReply]
    ) -> RoundState:
        """Return the n_k-weighted mean."""
        return RoundState(state.round, weighted_mean(replies, state.arrays), state.extras)


def initial_weights(common: CommonSettings, task: Task) -> dict[str, NDArray]:
    """Return the initial arrays of the network, the same for every method of a seed."""
    network = build_classifier(common, task)
    return {name: tensor.numpy() for name, tensor in exchanged_arrays(network).items()}
