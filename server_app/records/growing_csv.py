"""A CSV file that grows by the round, so that a late round costs no more than an early one.

Final lines are appended once. Open lines follow them, which the next writing replaces. A checkpoint
holds how many bytes are final and their CRC-32; a resumed run continues after those bytes.
"""

from __future__ import annotations

import csv
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.errors import CheckpointError, RunDirectoryError

Row = Sequence[Any]


class GrowingCsv:
    """The file, as far as this run has written it.

    Attributes:
        final: how many ``bytes`` will not change any more, the header among them, and their
            ``crc32``; 0 bytes before the first writing.
    """

    def __init__(self, path: Path, header: Row) -> None:
        self.path = path
        self.header = header
        self.final = {"bytes": 0, "crc32": 0}

    def write(self, final: Sequence[Row], still_open: Sequence[Row] = ()) -> None:
        """Append final rows, and put open ones behind them.

        Raises:
            RunDirectoryError: the file is gone, or shorter than it was.
        """
        text, size = io.StringIO(), self.final["bytes"]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows(final if size else [self.header, *final])
        added = text.getvalue().encode()
        writer.writerows(still_open)
        lines = text.getvalue().encode()
        try:
            if not size:
                write_atomically(self.path, lines)
            else:
                with self.path.open("r+b") as file:
                    if file.seek(0, os.SEEK_END) < size:
                        raise OSError(None, "it is shorter than it was")
                    file.seek(size)
                    file.write(lines)
                    file.truncate()
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path} cannot be continued ({error.strerror}): resume the run once it can, "
                "or start a new one"
            ) from None
        crc32 = zlib.crc32(added, self.final["crc32"])
        self.final = {"bytes": size + len(added), "crc32": crc32}

    def rows(self) -> Iterator[list[str]]:
        """Yield the final rows."""
        if self.final["bytes"]:
            with self.path.open("rb") as file:
                text = io.StringIO(file.read(self.final["bytes"]).decode(), newline="")
            reader = csv.reader(text)
            next(reader)
            yield from reader

    def restore(self, final: dict[str, int]) -> None:
        """Continue after the bytes that a checkpoint knows as ``final``.

        Raises:
            CheckpointError: the file does not begin with them.
        """
        size = final["bytes"]
        if size and self._checksum(size) != final["crc32"]:
            raise CheckpointError(
                f"{self.path} does not begin with the {size} bytes that the checkpoint knows: it "
                "was altered; restore it, or start a new run"
            )
        self.final = {"bytes": size, "crc32": final["crc32"]}

    def _checksum(self, size: int) -> int | None:
        """Return the CRC-32 of the first ``size`` bytes, or None if there are fewer."""
        try:
            data = self.path.read_bytes()[:size]
        except OSError:
            return None
        return zlib.crc32(data) if len(data) == size else None
