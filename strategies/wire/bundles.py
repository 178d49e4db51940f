"""The arrays of a record as one array on their way between processes.

Flower's SuperLink stores each array of a message as an object of its own, with several
transactions of its database for each hospital that fetches it: some 10 ms an array
(docs/deployment.md). With the thousands of arrays of a round in which models visit one another it
loses replies. So what goes to a real site and back travels as the bytes of one safetensors file,
and is opened before anything looks at it; a simulation's messages stay as they are.
"""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors import SafetensorError
from safetensors.numpy import load, save

from models.contract.errors import SiteError

BUNDLE = "safetensors"  # the only name in a bundled record
_KINDS = "biuf"  # of numpy's dtypes: truth values, whole numbers and floats

Bundles = dict[tuple[tuple[str, int], ...], tuple[list[Array], Array]]


def bundle(content: RecordDict, cache: Bundles | None = None) -> RecordDict:
    """Return ``content`` with each record's arrays in one; a record of one array stays as it is.

    Args:
        content: of a message.
        cache: bundles of before: the same data, sent to several sites, are put together once.
            Holding the arrays beside their bundle keeps the ids of their data their own.
    """
    cache = {} if cache is None else cache
    bundled = RecordDict(dict(content.items()))
    for name, record in content.array_records.items():
        if len(record) > 1 and all(np.dtype(a.dtype).kind in _KINDS for a in record.values()):
            bundled[name] = ArrayRecord({BUNDLE: _bundled(record, cache)})
    return bundled


def _bundled(record: ArrayRecord, cache: Bundles) -> Array:
    arrays = list(record.values())
    key = tuple((name, id(array.data)) for name, array in record.items())
    if key not in cache:
        data = save({name: np.asarray(a.numpy(), order="C") for name, a in record.items()})
        cache[key] = arrays, Array(np.frombuffer(data, np.uint8))
    return cache[key][1]


def unbundle(content: RecordDict) -> RecordDict:
    """Return ``content`` with what ``bundle`` put together taken apart.

    Raises:
        SiteError: a bundle is cut short or altered.
    """
    unbundled = RecordDict(dict(content.items()))
    for name, record in content.array_records.items():
        if list(record) == [BUNDLE]:
            unbundled[name] = _opened(name, record[BUNDLE])
    return unbundled


def _opened(name: str, array: Array) -> ArrayRecord:
    try:
        arrays = load(array.numpy().tobytes())
    except (SafetensorError, ValueError, TypeError, KeyError, EOFError, OSError) as error:
        reason = " ".join(str(error).split())
        raise SiteError(f"record '{name}' cannot be opened: {reason}; was it altered?") from None
    return ArrayRecord({key: Array(arrays[key]) for key in sorted(arrays)})


def record_bytes(content: RecordDict) -> int:
    """Return what ``content`` weighs on the wire, without the envelope."""
    weights = 0
    for record in content.values():
        if isinstance(record, ConfigRecord):  # Flower's own count fails at an empty text
            weights += sum(len(key) + len(str(value)) for key, value in record.items())
        else:
            weights += record.count_bytes()
    return weights
