"""numpy's archives of arrays, npz: read without pickles, and only arrays of the wanted kind."""

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

from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.one_line import one_line

_HEADER = 4096  # bytes, at most
# What numpy lets through of damaged headers, of its own and of Python's tokenizer
_DAMAGES = (
    *(zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, TypeError, MemoryError),
    *(RecursionError, SyntaxError, tokenize.TokenError),
)


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

    def most_bytes(self) -> int:
        """Return the size of the largest one with its header."""
        shapes = ([self.most if want is None else want for want in one] for one in self.shapes)
        return max(map(math.prod, shapes)) * self.itemsize + _HEADER

    def fits(self, array: npt.NDArray[Any]) -> bool:
        """Return whether an array is one."""
        number = array.dtype.kind in self.kinds and array.dtype.itemsize <= self.itemsize
        return number and any(
            array.ndim == len(wanted)
            and all(
                length <= self.most if want is None else length == want
                for length, want in zip(array.shape, wanted, strict=True)
            )
            for wanted in self.shapes
        )


def read_arrays(path: Path, wanted: Mapping[str, Wanted]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an npz file by name.

    Raises:
        DataError: the file is damaged, or an array is missing or of another type or shape.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # a small file may unpack to any size
            sizes = {member.filename: member.file_size for member in archive.infolist()}
        for name, what in wanted.items():
            if sizes.get(f"{name}.npy", 0) > what.most_bytes():
                raise DataError(f"{path}: {name} is larger than {what.words}")
        with np.load(path, allow_pickle=False) as arrays:
            for name in wanted:
                if name not in arrays.files:
                    raise DataError(f"{path}: array '{name}' is missing")
            found = {name: arrays[name] for name in wanted}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except _DAMAGES as error:
        raise DataError(f"{path} is damaged or no npz file ({one_line(error, 100)})") from None
    except (NotImplementedError, RuntimeError):  # other compressions, a password
        raise DataError(f"{path} is packed in a way that numpy does not write") from None
    for name, what in wanted.items():
        array = found[name]
        if not isinstance(array, np.ndarray) or not what.fits(array):
            kind = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else "no array"
            raise DataError(f"{path}: {name} is {one_line(kind, 100)}, and must be {what.words}")
    return found
