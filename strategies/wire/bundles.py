"""The arrays of a record as one array on their way between processes.

Flower's SuperLink stores each array of a message as an object of its own, with several
transactions of its database for each hospital that fetches it: some 10 ms an array
(docs/deployment.md). With the thousands of arrays of a round in which models visit one another it
loses replies. So what goes to a real site and back travels as the bytes of one safetensors file,
and is opened before anything looks at it; a simulation's messages stay as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors.numpy import save

from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.one_line import one_line
from fedsilo.strategies.wire.records import KINDS, ArrayError, unpack

BUNDLE = "safetensors"  # the only name in a bundled record
_DTYPES = {
    "BOOL": "bool",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}
_LENGTH = 8  # bytes of the header's own length
_LONGEST_HEADER = 2**22  # bytes: some 40,000 arrays
_LONGEST_NAME = 512  # characters
_DIMENSIONS = 32
_MOST_RECORDS = 16  # of arrays in a message; fedsilo's own have two

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


def unbundle(content: RecordDict, most: int | None = None) -> RecordDict:
    """Return ``content`` with what ``bundle`` put together taken apart.

    Args:
        content: of a message.
        most: bytes that all arrays of a record may have; None: any.

    Raises:
        SiteError: a bundle is cut short, altered, or larger than that, or there are many records.
    """
    records = content.array_records
    if fault := records_fault(records):
        raise SiteError(fault)
    unbundled = RecordDict(dict(content.items()))
    for name, record in records.items():
        if list(record) == [BUNDLE]:
            unbundled[name] = _opened(name, record[BUNDLE], most)
    return unbundled


def records_fault(records: Mapping[str, ArrayRecord]) -> str:
    """Say why the records of arrays of a message are not opened; empty: they are."""
    if len(records) > _MOST_RECORDS:
        return f"{len(records)} records of arrays, more than {_MOST_RECORDS}: was it altered?"
    return ""


def bundle_fault(name: str, record: ArrayRecord, most: int | None = None) -> str:
    """Say why a record that is a bundle cannot be opened; empty: it can, or is none."""
    if list(record) != [BUNDLE]:
        return ""
    try:
        _opened(name, record[BUNDLE], most)
    except SiteError as error:
        return str(error)
    return ""


def _opened(name: str, array: Array, most: int | None) -> ArrayRecord:
    try:
        data = unpack(array).reshape(-1)
        if most is not None and data.nbytes > most + _LONGEST_HEADER:
            raise ArrayError(f"it has {data.nbytes} bytes, and at most {most} are expected")
        entries, start = _entries(data)
        arrays = {key: _array(data[start:], entries[key]) for key in sorted(entries)}
    except ArrayError as error:
        raise SiteError(
            f"record '{one_line(name, 80)}' cannot be opened: {error}; was it altered?"
        ) from None
    return ArrayRecord({key: Array(array) for key, array in arrays.items()})


def _entries(data: Any) -> tuple[dict[str, Any], int]:
    """Return what a safetensors file says of its arrays, and where their bytes begin."""
    size = int.from_bytes(data[:_LENGTH].tobytes(), "little")
    if data.dtype != np.uint8 or len(data) < _LENGTH or size > len(data) - _LENGTH:
        raise ArrayError("it is cut short or no bundle")
    if size > _LONGEST_HEADER:
        raise ArrayError(f"its header has {size} bytes, more than {_LONGEST_HEADER}")
    try:
        entries = json.loads(data[_LENGTH : _LENGTH + size].tobytes())
    except (ValueError, RecursionError):
        raise ArrayError("its header is no JSON") from None
    if not isinstance(entries, dict) or any(len(key) > _LONGEST_NAME for key in entries):
        raise ArrayError("its header names no arrays")
    entries.pop("__metadata__", None)
    held = sum(_bytes_of(entry) for entry in entries.values())
    if held != len(data) - _LENGTH - size:
        raise ArrayError("it holds other bytes than its header says")
    return entries, _LENGTH + size


def _bytes_of(entry: Any) -> int:
    """Return how many bytes an array has, by what the header says of it."""
    if not isinstance(entry, dict) or str(entry.get("dtype")) not in _DTYPES:
        raise ArrayError("its header has an array of an unknown type")
    shape: Any = entry.get("shape")
    ends: Any = entry.get("data_offsets")
    if not _are_lengths(shape) or not _are_lengths(ends) or len(ends) != 2:
        raise ArrayError("its header has an array of no shape or place")
    needed = int(math.prod(shape) * np.dtype(_DTYPES[str(entry["dtype"])]).itemsize)
    if ends[1] - ends[0] != needed:
        raise ArrayError("its header has an array of another length than its shape needs")
    return needed


def _are_lengths(listed: Any) -> bool:
    return (
        isinstance(listed, list)
        and len(listed) <= _DIMENSIONS
        and all(type(length) is int and 0 <= length < 2**48 for length in listed)
    )


def _array(data: Any, entry: Any) -> Any:
    """Return an array of a bundle: a view of its bytes, checked by ``_bytes_of``."""
    first, last = entry["data_offsets"]
    part = data[first:last]
    if len(part) != last - first:
        raise ArrayError("its header places an array beyond its end")
    try:
        return part.view(_DTYPES[str(entry["dtype"])]).reshape(entry["shape"])
    except ValueError:
        raise ArrayError("its header has an array of no shape") from None


def record_bytes(content: RecordDict) -> int:
    """Return what ``content`` weighs on the wire, without the envelope."""
    weights = 0
    for record in content.values():
        if isinstance(record, ConfigRecord):  # Flower's own count fails at an empty text
            weights += sum(len(key) + len(str(value)) for key, value in record.items())
        else:
            weights += record.count_bytes()
    return weights
