"""Arrays as Flower's records: packed once for all sites, sorted by name, and opened with care.

What came over the wire is opened in one place. Its header is read first, and it says type and
shape; only if the bytes are as many as those need is there an array, so that nothing that came can
make more memory be taken than it has itself. Pickles, archives and text are no arrays.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord
from numpy.lib import format as npy

from fedsilo.models.contract.errors import SiteError
from fedsilo.models.contract.one_line import one_line

NDArray = npt.NDArray[Any]
Packed = dict[int, tuple[NDArray, Array]]

KINDS = "biuf"  # of numpy's dtypes: truth values, whole numbers and floats
_SERIALISED = "numpy.ndarray"  # flwr.common.constant.SType.NUMPY
_DIMENSIONS = 32
_LONGEST_HEADER = 4096  # bytes
_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class ArrayError(SiteError):
    """Bytes that came are no array of numbers."""


@dataclass(frozen=True)
class Header:
    """What an array's first bytes say of it.

    Attributes:
        dtype: of the numbers.
        shape: lengths, each 0 or more.
        fortran: whether the first index runs fastest.
        offset: bytes before the numbers.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int


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


def packed_bytes(array: NDArray) -> int:
    """Return how many bytes an array has when it is packed."""
    header = io.BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(array))
    return len(header.getvalue()) + array.nbytes


def from_record(record: ArrayRecord) -> dict[str, NDArray]:
    """Unpack arrays.

    Raises:
        ArrayError: one is none.
    """
    return {name: unpack(array) for name, array in record.items()}


def read_header(packed: Array) -> Header:
    """Return what the bytes of a packed array say of it; they are as many as that needs.

    Raises:
        ArrayError: they are no array of numbers, or more or fewer.
    """
    if packed.stype != _SERIALISED:
        raise ArrayError(f"it is of kind '{one_line(packed.stype, 40)}', not '{_SERIALISED}'")
    header = _header(packed.data)
    if header.dtype.kind not in KINDS:
        raise ArrayError(f"it holds {one_line(header.dtype, 40)}, no numbers")
    needed = header.offset + header.dtype.itemsize * math.prod(header.shape)
    if len(packed.data) != needed:
        raise ArrayError(
            f"it has {len(packed.data)} bytes, and {one_line(header.dtype, 40)} "
            f"{one_line(header.shape, 80)} needs {needed}"
        )
    return header


def unpack(packed: Array) -> NDArray:
    """Return a packed array, a copy of its own.

    Raises:
        ArrayError: its bytes are no array of numbers.
    """
    header = read_header(packed)
    try:
        flat = np.frombuffer(packed.data, header.dtype, offset=header.offset)
        view: NDArray = flat.reshape(header.shape, order="F" if header.fortran else "C")
    except (ValueError, TypeError, OverflowError):  # a length of 0 beside lengths beyond memory
        raise ArrayError(f"no array is {one_line(header.shape, 80)}") from None
    return view.copy(order="K")


def _header(data: bytes) -> Header:
    length = npy.MAGIC_LEN + 4 + _LONGEST_HEADER
    if data[npy.MAGIC_LEN - 2 : npy.MAGIC_LEN] == bytes((1, 0)):  # numpy's own: its length follows
        own = int.from_bytes(data[npy.MAGIC_LEN : npy.MAGIC_LEN + 2], "little")
        length = min(length, npy.MAGIC_LEN + 2 + own)
    return _parsed(data[:length])


@functools.lru_cache(maxsize=1024)  # of few shapes, each round again; of 4 KB at most
def _parsed(start: bytes) -> Header:
    file = io.BytesIO(start)
    try:
        version = npy.read_magic(file)
        read = _READERS[version]
        shape, fortran, dtype = read(file, max_header_size=_LONGEST_HEADER)
    except Exception as error:  # numpy's reader fails in any way that bad bytes can make it
        raise ArrayError(f"it has no array's header ({one_line(error, 120)})") from None
    whole = all(type(length) is int and 0 <= length < 2**62 for length in shape)
    if not whole or len(shape) > _DIMENSIONS:
        raise ArrayError(f"no array is {one_line(shape, 80)}")
    return Header(dtype, shape, fortran, file.tell())
