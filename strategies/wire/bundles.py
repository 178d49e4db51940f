"""The arrays of a record as one safetensors file on their way between processes.

Flower's SuperLink stores each array of a message as an object of its own, with several
transactions of its database for each hospital that fetches it: some 10 ms an array
(docs/deployment.md). With the thousands of arrays of a round in which models visit one another it
loses replies. So what goes to a real site and back travels as one file, which is opened before
anything looks at it; a simulation's messages are sent as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.one_line import one_line
from fedsilo.strategies.wire.records import KINDS, ArrayError, NDArray, unpack

BUNDLE = "safetensors"  # the only name in a bundled record
_LENGTH = 8  # bytes of the length of a file's header
_LONGEST_HEADER = 2**22  # bytes: some 40,000 arrays
_LONGEST_NAME = 512  # characters
_DIMENSIONS = 32
_MOST_RECORDS = 16  # of arrays in a message; fedsilo's own have two

Bundles = dict[tuple[tuple[str, int], ...], tuple[list[Array], Array]]


def bundle(content: RecordDict, cache: Bundles | None = None) -> RecordDict:
    """Return ``content`` with each record's arrays in one; a record of one array stays as it is.

    Args:
        content: of a message.
        cache: bundles made before: data that goes to several sites is serialised once. The arrays
            are kept beside their bundle, so that the ids of their data stay their own.
    """
    cache = {} if cache is None else cache
    bundled = RecordDict(dict(content.items()))
    for name, record in content.array_records.items():
        if len(record) > 1 and all(np.dtype(a.dtype).kind in KINDS for a in record.values()):
            bundled[name] = ArrayRecord({BUNDLE: _bundled(record, cache)})
    return bundled


def _bundled(record: ArrayRecord, cache: Bundles) -> Array:
    arrays = list(record.values())
    key = tuple((name, id(array.data)) for name, array in record.items())
    if key not in cache:
        data = save({name: np.asarray(unpack(a), order="C") for name, a in record.items()})
        cache[key] = arrays, Array(np.frombuffer(data, np.uint8))
    return cache[key][1]


def unbundle(content: RecordDict) -> RecordDict:
    """Return ``content`` with what ``bundle`` put together taken apart.

    Raises:
        SiteError: a bundle is cut short or altered, or there are too many records.
    """
    refuse_many_records(content.array_records)
    unbundled = RecordDict(dict(content.items()))
    for name, record in content.array_records.items():
        if list(record) == [BUNDLE]:
            arrays = opened(name, record[BUNDLE])
            unbundled[name] = ArrayRecord({key: Array(array) for key, array in arrays.items()})
    return unbundled


def refuse_many_records(records: Mapping[str, ArrayRecord]) -> None:
    """Refuse a message with more records of arrays than any of ours has.

    Raises:
        SiteError: it has.
    """
    if len(records) > _MOST_RECORDS:
        raise SiteError(
            f"{len(records)} records of arrays, more than {_MOST_RECORDS}: was it altered?"
        )


def opened(name: str, array: Array, most: int | None = None) -> dict[str, NDArray]:
    """Return the arrays of a bundle, sorted by name; they share the bundle's memory.

    Args:
        name: of the record, for errors.
        array: the bundle.
        most: bytes that its arrays may have together; None for any number.

    Raises:
        SiteError: it is cut short, altered, or larger than that.
    """
    try:
        data = unpack(array).reshape(-1)
        if data.dtype != np.uint8 or len(data) < _LENGTH:
            raise ArrayError("it is cut short or no bundle")
        if most is not None and data.nbytes > most + _LONGEST_HEADER:
            raise ArrayError(f"it has {data.nbytes} bytes, and at most {most} are expected")
        if int.from_bytes(data[:_LENGTH].tobytes(), "little") > _LONGEST_HEADER:
            raise ArrayError(
                f"its header has more than {_LONGEST_HEADER} bytes, or it is cut short"
            )
        arrays = _parsed(data.tobytes())
    except ArrayError as error:
        raise SiteError(
            f"record '{one_line(name, 80)}' cannot be opened: {error}; was it altered?"
        ) from None
    return {key: arrays[key] for key in sorted(arrays)}


def _parsed(data: bytes) -> dict[str, NDArray]:
    try:
        arrays: dict[str, NDArray] = load(data)
    except (SafetensorError, KeyError, ValueError, TypeError, OverflowError) as error:
        raise ArrayError(f"it is no safetensors file ({one_line(error, 120)})") from None
    for name, array in arrays.items():
        if len(name) > _LONGEST_NAME or array.ndim > _DIMENSIONS or array.dtype.kind not in KINDS:
            raise ArrayError("it holds an array of no usable name, shape or type")
    return arrays


def record_bytes(content: RecordDict) -> int:
    """Return the bytes of ``content`` on the wire, without the envelope."""
    weights = 0
    for record in content.values():
        if isinstance(record, ConfigRecord):  # Flower's own count fails at an empty text
            weights += sum(len(key) + len(str(value)) for key, value in record.items())
        else:
            weights += record.count_bytes()
    return weights
