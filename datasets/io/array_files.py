"""numpy's archives of arrays, npz, with each member's header checked before its content is read.

numpy alone would unpack a member to whatever size it has, and return one that is no array as bytes.
"""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.one_line import one_line

_LONGEST_HEADER = 4096  # bytes
_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
# What numpy's reader of headers lets through, of its own and of Python's tokenizer
_NO_HEADER = (RecursionError, SyntaxError, TypeError, KeyError, MemoryError, tokenize.TokenError)


@dataclass(frozen=True)
class Wanted:
    """What an array must be.

    Attributes:
        kinds: of numpy's dtypes, such as 'iu'.
        itemsize: bytes of a number, at most.
        shapes: any of these; None stands for any length.
        most: the longest that such a length may be.
        words: all of it, for errors.
    """

    kinds: str
    itemsize: int
    shapes: tuple[tuple[int | None, ...], ...]
    most: int
    words: str

    def fits(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
        """Return whether an array of that type and shape is one."""
        number = dtype.kind in self.kinds and dtype.itemsize <= self.itemsize
        return number and any(
            len(shape) == len(wanted)
            and all(
                0 <= length <= self.most if want is None else length == want
                for length, want in zip(shape, wanted, strict=True)
            )
            for wanted in self.shapes
        )


def read_arrays(path: Path, wanted: Mapping[str, Wanted]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an npz file by name.

    Raises:
        DataError: the file is damaged, or an array is missing or of another type or shape.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
            for name in wanted:
                if f"{name}.npy" not in names:
                    raise DataError(f"{path}: array '{name}' is missing")
            return {name: _member(archive, path, name, what) for name, what in wanted.items()}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError) as error:
        raise DataError(f"{path} is damaged or no npz file ({one_line(error, 100)})") from None
    except (NotImplementedError, RuntimeError):  # other compressions, a password
        raise DataError(f"{path} is packed in a way that numpy does not write") from None


def _member(archive: zipfile.ZipFile, path: Path, name: str, wanted: Wanted) -> npt.NDArray[Any]:
    with archive.open(f"{name}.npy") as file:
        try:
            read_header = _READERS[npy.read_magic(file)]
            shape, by_column, dtype = read_header(file, max_header_size=_LONGEST_HEADER)
        except _NO_HEADER:
            raise ValueError("a member that is no array") from None
        if not wanted.fits(dtype, shape):
            told = f"{one_line(dtype, 40)} {one_line(shape, 60)}"
            raise DataError(f"{path}: {name} is {told}, and must be {wanted.words}")
        content = file.read(math.prod(shape) * dtype.itemsize + 1)
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise DataError(f"{path}: {name} holds more or fewer numbers than its header says")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if by_column else "C")
