"""Arrays as Flower's records: serialised once for all sites, sorted by name, and opened with care.

Received bytes are opened only here. The header is read first; it states type and shape. An array is
made only if the number of bytes fits them, so received data can never take more memory than their
own size. Pickles, archives and text are refused.

Records for a real site travel as a bundle, one safetensors file per record. Flower's SuperLink
stores each array of a message as an object, which costs some 10 ms per array and hospital
(docs/deployment.md). In a simulation messages are not bundled.
"""

import functools
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.lib import format as npy
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedsilo.core.errors import SiteError
from fedsilo.core.one_line import one_line

NDArray = npt.NDArray[Any]
Names = tuple[tuple[str, int], ...]  # names of arrays, with the ids of the arrays
Packed = dict[int | Names, Any]  # an array with its serialised form, or a whole record

KINDS = "biuf"  # kinds of numpy dtypes: booleans, integers and floats
_SERIALISED = "numpy.ndarray"  # flwr.common.constant.SType.NUMPY
_DIMENSIONS = 32
_LONGEST_HEADER = 4096  # bytes
_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class ArrayError(SiteError):
    """Received bytes are not an array of numbers."""


@dataclass(frozen=True)
class Header:
    """The header of a serialised array."""

    dtype: np.dtype[Any]  # the type of the numbers
    shape: tuple[int, ...]  # the length of each dimension, 0 or more
    fortran: bool  # whether the first index varies fastest
    offset: int  # the number of bytes before the numbers


def to_record(arrays: Mapping[str, NDArray], packed: Packed | None = None) -> ArrayRecord:
    """Serialise arrays for the wire in Flower's format, sorted by name.

    Args:
        arrays: the arrays to send, by name.
        packed: a cache that lets several sites share serialised arrays and records. New entries are
            added. Its keys are the ``id`` values of arrays, with their names for a record. The
            cache also keeps the arrays, so that Python cannot give an id to another object. None
            for no cache.
    """
    if packed is None:
        packed = {}
    names = tuple((name, id(arrays[name])) for name in sorted(arrays))
    if names not in packed:
        record = dict[str, Array]()
        for name, key in names:
            if key not in packed:
                array = np.asarray(arrays[name], order="C")
                data = b"".join((_array_header(array.dtype, array.shape), array.data))
                sent = Array(str(array.dtype), array.shape, _SERIALISED, data)
                packed[key] = arrays[name], sent
            record[name] = packed[key][1]
        packed[names] = ArrayRecord(record)
    shared: ArrayRecord = packed[names]
    return shared


@functools.lru_cache(maxsize=4096)
def _array_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return numpy's header of an array whose last index varies fastest."""
    start = io.BytesIO()
    described = npy.header_data_from_array_1_0(np.broadcast_to(np.empty((), dtype), shape))
    npy.write_array_header_1_0(start, described | {"fortran_order": False})
    return start.getvalue()


def packed_bytes(array: NDArray) -> int:
    """Return the size of an array in serialised form, in bytes."""
    return len(_array_header(array.dtype, array.shape)) + array.nbytes


def from_record(record: ArrayRecord) -> dict[str, NDArray]:
    """Unpack all arrays of a record: name -> copy of the array, in the record's order.

    Raises:
        ArrayError: an entry is not an array of numbers.
    """
    return {name: unpack(array) for name, array in record.items()}


def read_header(packed: Array) -> Header:
    """Read the header of a serialised array, and check that the array's size fits it.

    The header states the type and the shape of the array, and where its numbers begin. The numbers
    are not read.

    Raises:
        ArrayError: the array is not serialised by numpy, its header is damaged, its type is not
            numeric, or it has more or fewer bytes than its type and shape need.
    """
    if packed.stype != _SERIALISED:
        raise ArrayError(f"it is of kind '{one_line(packed.stype, 40)}', not '{_SERIALISED}'")
    data, length = packed.data, npy.MAGIC_LEN + 4 + _LONGEST_HEADER
    # Version 1.0, which numpy writes, states the length of its header
    if data[npy.MAGIC_LEN - 2 : npy.MAGIC_LEN] == bytes((1, 0)):
        own = int.from_bytes(data[npy.MAGIC_LEN : npy.MAGIC_LEN + 2], "little")
        length = min(length, npy.MAGIC_LEN + 2 + own)
    header = _parse_header(data[:length])
    if header.dtype.kind not in KINDS:
        raise ArrayError(f"it holds {one_line(header.dtype, 40)}, not numbers")
    # Python's integers do not overflow, so no shape can make this check pass by wrapping around
    needed = header.offset + header.dtype.itemsize * math.prod(header.shape)
    if len(data) != needed:
        raise ArrayError(
            f"it has {len(data)} bytes, and {one_line(header.dtype, 40)} "
            f"{one_line(header.shape, 80)} needs {needed}"
        )
    return header


def unpack(packed: Array) -> NDArray:
    """Unpack a serialised array into a new array, in the memory order that its header states.

    NaN and infinity are not refused.

    Raises:
        ArrayError: the bytes hold no array of numbers, or their number does not fit the array's
            shape.
    """
    header = read_header(packed)
    try:
        flat = np.frombuffer(packed.data, header.dtype, offset=header.offset)
        view: NDArray = flat.reshape(header.shape)
        if header.fortran:
            view = flat.reshape(header.shape, order="F")
    except (ValueError, TypeError, OverflowError):  # a shape such as (0, 2**61)
        raise ArrayError(f"no array is {one_line(header.shape, 80)}") from None
    return view.copy(order="K")


# A model has few shapes, but they come back each round; an entry has at most 4 KB
@functools.lru_cache(maxsize=1024)
def _parse_header(start: bytes) -> Header:
    file = io.BytesIO(start)
    try:
        version = npy.read_magic(file)
        read = _READERS[version]
        shape, fortran, dtype = read(file, max_header_size=_LONGEST_HEADER)
    except Exception as error:  # malformed bytes can make numpy's reader fail in any way
        raise ArrayError(
            f"its header is not the header of an array ({one_line(error, 120)})"
        ) from None
    # ``type`` and not isinstance, because True is an int
    are_lengths = all(type(length) is int and 0 <= length < 2**62 for length in shape)
    if not are_lengths or len(shape) > _DIMENSIONS:
        raise ArrayError(f"no array is {one_line(shape, 80)}")
    return Header(dtype, shape, fortran, file.tell())


BUNDLE = "safetensors"  # the only name in a bundled record
_LENGTH = 8  # bytes that state the length of a file's header
_LONGEST_LISTING = 2**22  # bytes, for some 40,000 arrays
_LONGEST_NAME = 512  # characters
_MOST_RECORDS = 16  # the most array records in a message; fedsilo's own have two

Bundles = dict[tuple[tuple[str, int], ...], tuple[list[Array], Array]]


def bundle(content: RecordDict, cache: Bundles | None = None) -> RecordDict:
    """Return a message's content with each record's arrays joined into one bundle.

    A bundle is one array with the bytes of a safetensors file. A record stays unchanged if it has
    fewer than two arrays, or an array that does not hold numbers.

    Args:
        content: the content of a message, which is not changed.
        cache: bundles already made, so that data for several sites is serialised only once. New
            bundles are added. Its keys have the names of arrays and the ids of their data. It also
            keeps the arrays, so that Python cannot reuse the ids. None for no cache.
    """
    if cache is None:
        cache = {}
    bundled = RecordDict(dict(content.items()))
    for name, record in content.array_records.items():
        if len(record) < 2:
            continue
        if all(np.dtype(array.dtype).kind in KINDS for array in record.values()):
            bundled[name] = ArrayRecord({BUNDLE: _bundle(record, cache)})
    return bundled


def _bundle(record: ArrayRecord, cache: Bundles) -> Array:
    arrays = list(record.values())
    key = tuple((name, id(array.data)) for name, array in record.items())
    if key not in cache:
        unpacked: dict[str, NDArray] = {}
        for name, array in record.items():
            unpacked[name] = np.asarray(unpack(array), order="C")
        cache[key] = arrays, Array(np.frombuffer(save(unpacked), np.uint8))
    return cache[key][1]


def unbundle(content: RecordDict) -> RecordDict:
    """Return a message's content with each bundle replaced by the arrays in it.

    A record is a bundle if its only array is named "safetensors". Other records stay unchanged.

    Raises:
        SiteError: a bundle is damaged, or there are more than 16 records of arrays.
    """
    refuse_many_records(content.array_records)
    unbundled = RecordDict(dict(content.items()))
    for name, record in content.array_records.items():
        if list(record) == [BUNDLE]:
            arrays = open_bundle(name, record[BUNDLE]).items()
            unbundled[name] = ArrayRecord({key: Array(array) for key, array in arrays})
    return unbundled


def refuse_many_records(records: Mapping[str, ArrayRecord]) -> None:
    """Check that a message has at most 16 array records, far more than genuine messages have.

    Raises:
        SiteError: the message has more than 16 array records.
    """
    if len(records) > _MOST_RECORDS:
        raise SiteError(
            f"{len(records)} records of arrays, more than {_MOST_RECORDS}: was it altered?"
        )


def open_bundle(name: str, array: Array, most: int | None = None) -> dict[str, NDArray]:
    """Return the arrays of a bundle by name, in the order of their names.

    A bundle is one array with the bytes of many. The sizes that the bundle states are checked
    before its bytes are parsed.

    Args:
        name: the name of the record, for errors.
        array: the bundle.
        most: the largest total size of the arrays in bytes, or None for no limit. The bundle's
            header may have 4 MiB more.

    Raises:
        SiteError: the bundle is cut short, altered or too large, or an array in it has an unusable
            name, shape or type.
    """
    try:
        data = unpack(array).reshape(-1)
        # The sizes are checked before the parser sees the bytes, because it trusts the header
        if data.dtype != np.uint8 or len(data) < _LENGTH:
            raise ArrayError("it is cut short or is not a bundle")
        if most is not None and data.nbytes > most + _LONGEST_LISTING:
            raise ArrayError(f"it has {data.nbytes} bytes, but at most {most} are expected")
        if int.from_bytes(data[:_LENGTH].tobytes(), "little") > _LONGEST_LISTING:
            raise ArrayError(
                f"its header has more than {_LONGEST_LISTING} bytes, or it is cut short"
            )
        arrays = _arrays_in(data.tobytes())
    except ArrayError as error:
        raise SiteError(
            f"record '{one_line(name, 80)}' cannot be opened: {error}; was it altered?"
        ) from None
    return dict(sorted(arrays.items()))


def _arrays_in(data: bytes) -> dict[str, NDArray]:
    try:
        arrays: dict[str, NDArray] = load(data)
    except (SafetensorError, KeyError, ValueError, TypeError, OverflowError) as error:
        raise ArrayError(f"it is not a safetensors file ({one_line(error, 120)})") from None
    for name, array in arrays.items():
        if len(name) > _LONGEST_NAME or array.ndim > _DIMENSIONS or array.dtype.kind not in KINDS:
            raise ArrayError("it holds an array with an unusable name, shape or type")
    return arrays


def record_bytes(content: RecordDict) -> int:
    """Return the number of bytes of a message's content on the wire, without Flower's envelope.

    The size of a config record is only estimated. It is the number of characters of its keys and of
    its values as text.
    """
    weights = 0
    for record in content.values():
        if isinstance(record, ConfigRecord):  # Flower's own count fails at an empty text
            for key, value in record.items():
                weights += len(key) + len(str(value))
        else:
            weights += record.count_bytes()
    return weights
