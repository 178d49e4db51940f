"""What a run needs to go on: the round state, and a site's reply as the methods see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, RecordDict
from torch import nn

from datasets.weights.backbones import load_backbone
from datasets.weights.initial_weights import load_initial_weights
from models.contract.messages import ARRAYS, KEPT_STATE, METRICS, NUM_EXAMPLES
from models.contract.settings import CommonSettings
from models.networks.build import build_classifier
from models.networks.classifier import TokenClassifier
from models.networks.exchanged import exchanged_arrays
from models.networks.kinds import Task

NDArray = npt.NDArray[Any]
Packed = dict[int, tuple[NDArray, Array]]


@dataclass(frozen=True)
class RoundState:
    """The server's state after a round.

    Attributes:
        round: rounds finished; 0 before the first.
        arrays: the global arrays by name; empty where nothing is shared.
        extras: what else the method must remember, as JSON.
        keepers: sites that have told that they keep private state of this run; the loop's own.
    """

    round: int
    arrays: Mapping[str, NDArray]
    extras: Mapping[str, Any] = field(default_factory=dict)
    keepers: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArraySpec:
    """What a reply's array must be: float32 of ``shape``, where None stands for any length."""

    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class SiteReply:
    """A site's checked reply."""

    site: str
    content: RecordDict
    bytes_down: int
    bytes_up: int

    def array(self, name: str) -> NDArray:
        """Return the array ``name``."""
        found: NDArray = self.content.array_records[ARRAYS][name].numpy()
        return found

    def metric(self, key: str) -> float:
        """Return the metric ``key``."""
        return float(str(self.content.metric_records[METRICS][key]))

    def metrics(self) -> dict[str, float]:
        """Return all metrics."""
        return {key: self.metric(key) for key in self.content.metric_records[METRICS]}

    def kept_state(self) -> bool:
        """Tell whether the site has stored private state for this phase."""
        return self.content.metric_records[METRICS].get(KEPT_STATE, 0) == 1

    def examples(self) -> int:
        """Return the number of training samples behind the reply."""
        return int(self.metric(NUM_EXAMPLES))


def initial_weights(network: nn.Module) -> dict[str, NDArray]:
    """Return the exchanged arrays of a new network; for one seed the same for every method."""
    return {name: tensor.numpy() for name, tensor in exchanged_arrays(network).items()}


def starting_network(common: CommonSettings, task: Task) -> TokenClassifier:
    """Return the network that a run starts from; given weights only if they are exchanged.

    Raises:
        SettingError: its weights are missing or of another architecture.
    """
    network = build_classifier(common, task)
    if common.train_backbone or common.network == "resnet22":
        load_backbone(network, common)
    load_initial_weights(network, common)
    return network


def to_record(arrays: Mapping[str, NDArray], packed: Packed | None = None) -> ArrayRecord:
    """Pack arrays for the wire, sorted by name.

    Args:
        arrays: what to send.
        packed: what was packed before; the same array object is not serialised again for each
            site. Holding the array beside its packed form keeps the object's id its own.
    """
    packed = {} if packed is None else packed
    for array in arrays.values():
        if id(array) not in packed:
            packed[id(array)] = (array, Array(np.asarray(array, order="C")))
    return ArrayRecord({name: packed[id(arrays[name])][1] for name in sorted(arrays)})


def from_record(record: ArrayRecord) -> dict[str, NDArray]:
    """Unpack arrays."""
    return {name: array.numpy() for name, array in record.items()}
