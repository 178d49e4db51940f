"""The first answer to a survey, kept for good: whoever asks again, however, gets it again.

Of two answers the difference would be told too: of a set of bins moved a little, or of data that
have one patient more, it is that patient. So a data set's first answer stays until the hospital
itself removes it, ``<state-dir>/.own/<site>/survey.json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.errors import CheckpointError
from fedsilo.models.contract.settings_schema import Value

FILE = "survey.json"


@dataclass(frozen=True)
class Kept:
    """A first answer.

    Attributes:
        parts: of the answer, as they left or may leave.
        settings: those of the run that decided what was counted, by key.
        fingerprint: of the data.
    """

    parts: Mapping[str, str]
    settings: Mapping[str, Value]
    fingerprint: Mapping[str, str]


def first_answer(folder: Path, dataset: str, make: Callable[[], Kept]) -> tuple[Kept, bool]:
    """Return a data set's first answer, and whether it was made and kept just now.

    Args:
        folder: of what the hospital keeps over all runs.
        dataset: its name.
        make: makes one, where none is kept.

    Raises:
        CheckpointError: what is kept is damaged, or cannot be written.
    """
    with _locked(folder) as path:
        known = _read(path)
        if dataset in known:
            return known[dataset], False
        made = make()
        content = {name: asdict(kept) for name, kept in {**known, dataset: made}.items()}
        try:
            write_atomically(path, json.dumps(content) + "\n", mode=0o600)
        except OSError as error:
            raise _unwritable(error) from None
        return made, True


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Let one question at a time in: two side by side would have two first answers."""
    import fcntl  # of Linux and macOS, where hospitals' containers run

    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / ".survey.lock").open("w")
    except OSError as error:
        raise _unwritable(error) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder / FILE


def _unwritable(error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the hospital's own {FILE} cannot be written ({error.strerror}), and no survey leaves "
        "that is not kept: make room or mend the disk"
    )


def _read(path: Path) -> dict[str, Kept]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {name: _checked(Kept(**kept)) for name, kept in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"the hospital's own {FILE} is damaged ({type(error).__name__}): bring it back; if it "
            "is removed the next survey gets an answer anew"
        ) from None


def _checked(kept: Kept) -> Kept:
    for part in (kept.parts, kept.settings, kept.fingerprint):
        if not isinstance(part, dict):
            raise TypeError("a part is no mapping")
    if not all(isinstance(text, str) for text in kept.parts.values()):
        raise TypeError("an answer is no text")
    return kept
