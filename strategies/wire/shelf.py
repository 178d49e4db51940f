"""Where the replies of a phase lie until they are combined: the first in memory, the rest on disk.

A phase's replies are of as many models as there are sites. So that a server's memory does not grow
with them, what comes beyond ``IN_MEMORY`` bytes is written to a file without a name in the run
directory (or the machine's folder of temporary files where there is none), and read an array at a
time. The file is gone with the phase, and with the process.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

from flwr.app import Array, ArrayRecord, RecordDict

from fedsilo.models.contract.errors import RunDirectoryError

IN_MEMORY = 2**26  # bytes of a phase's replies


class Shelf:
    """Keeps the arrays of replies while a block runs.

    Args:
        folder: where the file may lie; empty: among the machine's temporary files.
        in_memory: bytes of all replies together that stay in memory.
    """

    def __init__(self, folder: str = "", in_memory: int = IN_MEMORY) -> None:
        self._folder = folder if folder and Path(folder).is_dir() else None
        self._room = in_memory
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Shelf:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Drop the file."""
        if self._file:
            self._file.close()

    def keep(self, content: RecordDict) -> RecordDict:
        """Return ``content`` with arrays that are read from the shelf when they are asked for.

        Raises:
            RunDirectoryError: the disk has no room.
        """
        kept = RecordDict(dict(content.items()))
        for name, record in content.array_records.items():
            size = sum(len(array.data) for array in record.values())
            if size <= self._room:
                self._room -= size
            else:
                shelved = ArrayRecord()  # given arrays it would copy them
                for key, array in record.items():
                    shelved[key] = self._shelved(array)
                kept[name] = shelved
        return kept

    def _shelved(self, array: Array) -> Array:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
            place = self._file.seek(0, os.SEEK_END)
            self._file.write(array.data)
            self._file.flush()
        except OSError as error:
            raise RunDirectoryError(
                f"the replies of a phase cannot be kept in {self._folder or tempfile.gettempdir()} "
                f"({error.strerror}): make room there and resume"
            ) from None
        return _ShelvedArray(array, self._file, place)


class _ShelvedArray(Array):
    """An array whose bytes lie in a file, from ``place`` on."""

    def __init__(self, array: Array, file: IO[bytes], place: int) -> None:
        self.dtype, self.shape, self.stype = array.dtype, array.shape, array.stype
        self._file, self._place, self._length = file, place, len(array.data)

    @property
    def data(self) -> bytes:  # type: ignore[override]  # Flower's is a plain attribute
        """Read the bytes."""
        self._file.seek(self._place)
        return self._file.read(self._length)
