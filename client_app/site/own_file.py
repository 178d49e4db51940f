"""JSON files that a hospital keeps between messages, such as the run book and the ledgers."""

import fcntl  # only on Linux and macOS, where hospitals' containers run
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import NonNegativeInt, TypeAdapter

from fedsilo.core.errors import CheckpointError
from fedsilo.core.files.atomic_files import open_regular, read_regular, write_atomically

T = TypeVar("T")
_SEED_BITS = 62


@dataclass(frozen=True)
class OwnFile(Generic[T]):
    """A JSON file that is complete or absent, and readable only by its owner."""

    path: Path
    kind: Any  # the type of its content; pydantic reads, checks and writes by it
    what: str  # names the file in errors, such as "the hospital's run book runs.json"
    lost: str  # the advice if it is damaged
    # The advice if it cannot be written
    full: str = "make room or repair the disk, then resume the run"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the file's lock during the block, so that only one message at a time uses the file.

        Other processes wait. The block must not take the lock again, because it would wait for
        itself forever. The folder, and a lock file beside the file, are created if they are
        missing.

        Raises:
            CheckpointError: the folder or the lock file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            name = self.path.with_name(f".{self.path.stem}.lock")
            lock = open_regular(name, os.O_WRONLY | os.O_CREAT)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def read(self, absent: T) -> T:
        """Return the file's content, or ``absent`` if the file does not exist.

        Raises:
            CheckpointError: the file cannot be read, or its content is not JSON of the file's
                declared type, the attribute ``kind``.
        """
        try:
            content: T = _adapter(self.kind).validate_json(read_regular(self.path), strict=True)
        except FileNotFoundError:
            return absent
        except (OSError, ValueError) as error:
            fault = getattr(error, "strerror", None) or type(error).__name__
            raise CheckpointError(f"{self.what} is damaged ({fault}): {self.lost}") from None
        return content

    def write(self, content: T) -> None:
        """Replace the file's content with ``content``; after a failure the old file remains.

        Raises:
            CheckpointError: the file cannot be written.
        """
        try:
            write_atomically(self.path, _adapter(self.kind).dump_json(content) + b"\n", mode=0o600)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.what} cannot be written ({error.strerror}): {self.full}")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def secret_seed(folder: Path) -> int:
    """Return the hospital's secret seed in ``folder``; the first call draws and stores it.

    The hospital's random draws, such as the order of samples and dropout, follow from this seed. A
    server that knew it would know which patients are in each step. A simulation uses the run's seed
    instead, because its runs must be repeatable.

    Returns:
        An integer from 0 to 2**62 - 1.

    Raises:
        CheckpointError: the seed's file is damaged, or cannot be written.
    """
    file: OwnFile[int | None] = OwnFile(
        folder / "seed",
        NonNegativeInt,
        "the hospital's own seed 'seed'",
        "bring it back, or remove the file: a new one is drawn, and running runs lose their order",
    )
    with file.lock():  # two messages at once must not both draw
        seed = file.read(None)
        if seed is None:
            seed = secrets.randbits(_SEED_BITS)
            file.write(seed)
    return seed
