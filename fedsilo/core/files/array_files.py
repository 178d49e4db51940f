"""Archives of arrays (npz), read without pickles and within a memory limit.

The sizes of all members are checked before any member is inflated. Each array's header is read
before its numbers, which are read only if their size matches the size of the array's member.
"""

import io
import math
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from fedsilo.core.errors import DataError
from fedsilo.core.files.unpacked_size import check_members
from fedsilo.core.one_line import one_line

# Errors for damaged files: numpy does not catch those of zipfile and of Python's tokenizer
DAMAGES = (
    *(zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, TypeError, MemoryError),
    *(RecursionError, SyntaxError, tokenize.TokenError),
)
_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_LONGEST_HEADER = 2**16  # bytes
_PART = 2**20  # bytes that are inflated at once


def read_arrays(path: Path, names: Sequence[str], most: int) -> dict[str, npt.NDArray[Any]]:
    """Read the arrays ``names`` from an npz file, without executing any code in the file.

    Args:
        path: the file.
        names: the arrays to read. Other arrays in the file are ignored.
        most: the most bytes that one array may have, unpacked and with its npy header.

    Returns:
        Name -> array, in the order of ``names``.

    Raises:
        DataError: the file is missing, damaged, or packed in a way that numpy does not write. The
            error is also raised if an array is missing, has Python objects or is larger than
            ``most``, or if all arrays together are too large. By default, the limit for all is 1
            GiB, or 16 times the file's size on disk if that is more.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = _find_members(path, archive, names)
            # The sizes are only stated here; reading an array checks that its size is true
            for entry in entries.values():
                if entry.file_size > most:
                    raise DataError(f"{path}: {entry.filename} is larger than {most} bytes")
            check_members(path, entries.values())
            return {name: _read_array(path, archive, entry) for name, entry in entries.items()}
    except OSError as error:
        fault = f"cannot be read: {error.strerror or error}"
    except DAMAGES as error:
        fault = f"is damaged or not an npz file ({one_line(error, 100)})"
    except (NotImplementedError, RuntimeError):  # other compressions, a password
        fault = "is packed in a way that numpy does not write"
    raise DataError(f"{path} {fault}")


def _find_members(
    path: Path, archive: zipfile.ZipFile, names: Sequence[str]
) -> dict[str, zipfile.ZipInfo]:
    """Map each of ``names`` to the archive's member ``<name>.npy``, in the order of ``names``.

    Args:
        path: the archive's path, for the error.
        archive: the open npz file.
        names: the names of the arrays.

    Raises:
        DataError: an array is missing.
    """
    entries: dict[str, zipfile.ZipInfo] = {}
    for name in names:
        try:
            entries[name] = archive.getinfo(f"{name}.npy")
        except KeyError:
            raise DataError(f"{path}: array '{name}' is missing") from None
    return entries


def _read_array(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> npt.NDArray[Any]:
    """Read one array of an npz file, after checking that its header fits the member's size.

    The check comes before memory is reserved, so a false header cannot exhaust the memory.

    Args:
        path: the npz file, for errors.
        archive: the open file.
        entry: the array's member in the file, ``<name>.npy``.

    Raises:
        DataError: the member does not begin like an npy file.
        ValueError: the header is malformed or does not fit the member's size, the member is longer
            than its header says, or the array holds Python objects.
        EOFError: the member ends before the array's last value.
        Exception: the file is damaged in another way. ``read_arrays`` turns such an error, for
            example zlib.error, into a DataError.
    """
    with archive.open(entry) as member:
        start = member.read(npy.MAGIC_LEN)
        # The last two bytes are the version, which the header's reader checks
        if start[: npy.MAGIC_LEN - 2] != npy.MAGIC_PREFIX:
            raise DataError(f"{path}: {entry.filename.removesuffix('.npy')} is not an array")
        shape, fortran, dtype = _read_header(member, start)
        count = math.prod(shape)
        if dtype.hasobject or member.tell() + count * dtype.itemsize != entry.file_size:
            raise ValueError(f"the header of {entry.filename} does not fit its size")
        flat = np.empty(count, dtype)
        _read_into(flat, member)
    if fortran:
        return flat.reshape(shape, order="F")
    return flat.reshape(shape)


def _read_header(member: IO[bytes], start: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read an array's shape, memory order and type from its npy header.

    Args:
        member: the open member of the archive. Its first 8 bytes have been read already.
        start: these 8 bytes, which are the magic string and the version.

    Returns:
        The shape, the memory order and the type. The order is True for Fortran order, in which
        columns come first, and False for C order. The next byte that ``member`` reads is the first
        byte of the values.

    Raises:
        ValueError: the version is unknown, the header is malformed or too long, or a dimension of
            the shape is negative or not an integer.
    """
    version = npy.read_magic(io.BytesIO(start))
    if version not in _READERS:
        raise ValueError(f"its npy version is {version}")
    shape, fortran, dtype = _READERS[version](member, max_header_size=_LONGEST_HEADER)
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"an array cannot have the shape {shape}")
    return shape, fortran, dtype


def _read_into(flat: npt.NDArray[Any], member: IO[bytes]) -> None:
    """Read a member's remaining bytes into the one-dimensional array ``flat``.

    One MiB is read at a time, because reading all at once would need twice the memory. If the array
    is empty, nothing is read, and no error is raised.

    Raises:
        EOFError: the member has fewer bytes than the array.
        ValueError: the member has more bytes than the array.
    """
    if not flat.nbytes:
        return
    into = flat.view(np.uint8).data
    done = 0
    while done < len(into):
        part = member.read(min(_PART, len(into) - done))
        if not part:
            raise EOFError("it is cut short")
        into[done : done + len(part)] = part
        done += len(part)
    if member.read(1):
        raise ValueError("it is longer than its header says")


def kind_of(array: npt.NDArray[Any]) -> str:
    """Describe an array's type and shape, for errors."""
    return one_line(f"{array.dtype} {array.shape}", 100)
