"""Archives of arrays (npz), read without pickles and without more memory than expected."""

import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.one_line import one_line

# What numpy lets through of damaged headers, of its own and of Python's tokenizer
DAMAGES = (
    *(zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, TypeError, MemoryError),
    *(RecursionError, SyntaxError, tokenize.TokenError),
)


def read_arrays(path: Path, names: Sequence[str], most: int) -> dict[str, npt.NDArray[Any]]:
    """Return arrays of an npz file, none of more than ``most`` bytes.

    Raises:
        DataError: the file is missing or damaged, an array is missing, too large or none.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # a small file may unpack to any size
            large = {e.filename for e in archive.infolist() if e.file_size > most}
        if large := large & {f"{name}.npy" for name in names}:
            raise DataError(f"{path}: {min(large)} is larger than {most} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            for name in names:
                if name not in arrays.files:
                    raise DataError(f"{path}: array '{name}' is missing")
            found = {name: arrays[name] for name in names}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except DAMAGES as error:
        raise DataError(f"{path} is damaged or not an npz file ({one_line(error, 100)})") from None
    except (NotImplementedError, RuntimeError):  # other compressions, a password
        raise DataError(f"{path} is packed in a way that numpy does not write") from None
    for name, array in found.items():  # numpy returns a member that is no array as bytes
        if not isinstance(array, np.ndarray):
            raise DataError(f"{path}: {name} is not an array")
    return found


def kind_of(array: npt.NDArray[Any]) -> str:
    """Say what an array is."""
    return one_line(f"{array.dtype} {array.shape}", 100)
