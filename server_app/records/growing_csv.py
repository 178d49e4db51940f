"""A CSV file of a run that grows by the round: what stands there is not written again.

Settled lines are appended once; behind them lie open ones, which the next writing replaces. A
checkpoint holds how many bytes are settled, and their CRC-32: a resumed run cuts the file back to
them. So neither file nor checkpoint costs more in a late round than in an early one.
"""

from __future__ import annotations

import csv
import io
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.errors import CheckpointError, RunDirectoryError

Rows = Iterable[Sequence[Any]]
_CHUNK = 2**20  # bytes read at once


class GrowingCsv:
    """The file, as far as this run has settled it.

    Attributes:
        path: where it lies.
        size: bytes that are settled, the header among them; 0: nothing is written yet.
        checksum: CRC-32 of those.
    """

    def __init__(self, path: Path, header: Sequence[str]) -> None:
        self.path = path
        self.header = header
        self.size = self.checksum = 0

    def write(self, settled: Rows, still_open: Rows = ()) -> None:
        """Append settled rows, and put open ones behind them.

        Raises:
            RunDirectoryError: the file is gone, or shorter than what was settled.
        """
        if self.size == 0:
            fixed = _lines([self.header, *settled])
            write_atomically(self.path, fixed + _lines(still_open))
        else:
            fixed = _lines(settled)
            self._put(fixed + _lines(still_open))
        self.size += len(fixed)
        self.checksum = zlib.crc32(fixed, self.checksum)

    def rows(self) -> Iterator[list[str]]:
        """Yield the settled rows."""
        if self.size:
            with self.path.open("rb") as file:
                text = io.StringIO(file.read(self.size).decode(), newline="")
            reader = csv.reader(text)
            next(reader)
            yield from reader

    def state(self) -> dict[str, int]:
        """Return what a resumed run cuts the file back to."""
        return {"bytes": self.size, "crc32": self.checksum}

    def restore(self, state: dict[str, int]) -> None:
        """Take it back.

        Raises:
            CheckpointError: the file has other content.
        """
        if state["bytes"] and _checksum(self.path, state["bytes"]) != state["crc32"]:
            raise CheckpointError(
                f"{self.path} does not begin with the {state['bytes']} bytes that the checkpoint "
                "knows: it was altered; put it back, or start a new run"
            )
        self.size, self.checksum = state["bytes"], state["crc32"]

    def _put(self, data: bytes) -> None:
        try:
            with self.path.open("r+b") as file:
                if file.seek(0, os.SEEK_END) < self.size:
                    raise OSError(None, "it is shorter than it was")
                file.seek(self.size)
                file.write(data)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path} cannot be written on ({error.strerror}): resume the run once it can, "
                "or start a new one"
            ) from None


def _lines(rows: Rows) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _checksum(path: Path, size: int) -> int | None:
    """Return the CRC-32 of the first ``size`` bytes; None: there are not so many."""
    checksum, left = 0, size
    try:
        with path.open("rb") as file:
            while left and (chunk := file.read(min(_CHUNK, left))):
                checksum, left = zlib.crc32(chunk, checksum), left - len(chunk)
    except OSError:
        return None
    return None if left else checksum
