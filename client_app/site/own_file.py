"""A JSON file that a hospital keeps from message to message, such as its run book or a ledger."""

import fcntl  # of Linux and macOS, where hospitals' containers run
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.errors import CheckpointError

T = TypeVar("T")
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class OwnFile:
    """A file that is whole or absent, and readable by its owner alone.

    Attributes:
        path: where it is.
        what: names it in errors, such as "the hospital's run book runs.json".
        lost: what to do when it is damaged.
        full: what to do when it cannot be written.
    """

    path: Path
    what: str
    lost: str
    full: str = "make room or repair the disk, then resume the run"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one message at a time change the file; others wait.

        Raises:
            CheckpointError: its folder cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = self.path.with_name(f".{self.path.stem}.lock").open("w")
        except OSError as error:
            raise self._unwritable(error) from None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def read(self, parse: Callable[[Any], T], absent: T) -> T:
        """Return what ``parse`` makes of the content, or ``absent`` where there is no file.

        Raises:
            CheckpointError: it is damaged, or ``parse`` fails.
        """
        try:
            return parse(json.loads(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return absent
        except _DAMAGED as error:
            kind = type(error).__name__
            raise CheckpointError(f"{self.what} is damaged ({kind}): {self.lost}") from None

    def write(self, content: Any) -> None:
        """Store ``content``, whole or not at all.

        Raises:
            CheckpointError: it cannot be written.
        """
        try:
            write_atomically(self.path, json.dumps(content) + "\n", mode=0o600)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.what} cannot be written ({error.strerror}): {self.full}")
