"""Arrays as Flower's records: packed once for all sites, sorted by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord

NDArray = npt.NDArray[Any]
Packed = dict[int, tuple[NDArray, Array]]


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
