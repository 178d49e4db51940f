"""Arrays of replies until they are combined: the first in memory, the rest in a file.

The replies of a round are as many models as there are sites. So that a server's memory does not
grow with them, what comes beyond ``IN_MEMORY`` bytes is written to a file without a name in the run
directory (or among the machine's temporary files where there is none), and read an array at a time.
The file is gone with the round, and with the process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np

from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.strategies.wire.records import NDArray

IN_MEMORY = 2**26  # bytes of a round's replies


class Spill:
    """Keeps the arrays of a round's replies.

    Args:
        folder: where the file may be; empty for the machine's temporary files.
        in_memory: bytes of all replies together that stay in memory.
    """

    def __init__(self, folder: str = "", in_memory: int = IN_MEMORY) -> None:
        self._folder = folder if folder and Path(folder).is_dir() else None
        self._room = in_memory
        self._file: IO[bytes] | None = None

    def keep(self, arrays: Mapping[str, NDArray]) -> Mapping[str, NDArray]:
        """Return ``arrays``, or the same to be read from the file one by one.

        Raises:
            RunDirectoryError: the disk has no room.
        """
        size = sum(array.nbytes for array in arrays.values())
        if size <= self._room:
            self._room -= size
            return arrays
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
            return SpilledArrays(self._file, arrays)
        except OSError as error:
            raise RunDirectoryError(
                f"the replies of a round cannot be kept in {self._folder or tempfile.gettempdir()} "
                f"({error.strerror}): make room there and resume"
            ) from None

    def close(self) -> None:
        """Drop the file."""
        if self._file:
            self._file.close()


class SpilledArrays(Mapping[str, NDArray]):
    """Arrays that are in a file; each access reads one."""

    def __init__(self, file: IO[bytes], arrays: Mapping[str, NDArray]) -> None:
        self._file = file
        self._places: dict[str, tuple[int, np.dtype[np.generic], tuple[int, ...]]] = {}
        for name, array in arrays.items():
            self._places[name] = file.seek(0, os.SEEK_END), array.dtype, array.shape
            file.write(np.ascontiguousarray(array).data)
        file.flush()

    def __getitem__(self, name: str) -> NDArray:
        """Read an array."""
        place, dtype, shape = self._places[name]
        self._file.seek(place)
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self._file.read(size), dtype).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._places)

    def __len__(self) -> int:
        """Return the number of arrays."""
        return len(self._places)
