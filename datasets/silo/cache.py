"""Silos in the cache: each in a folder named after all that decides its content, made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedsilo.datasets.io.sealed_folders import json_digest, open_sealed
from fedsilo.datasets.silo.silos import Silo, open_silo

_KEY_LENGTH = 16  # hexadecimal digits


def cached_silo(
    folder: Path,
    name: str,
    facts: Sequence[Any],
    classes: int,
    fill: Callable[[Path], None],
) -> Silo:
    """Return a silo from the cache; it is made first if it is not there or was altered.

    Args:
        folder: the cache's folder of the data set's silos.
        name: the beginning of the silo's own folder's name, before its key.
        facts: all that decides the content, JSON-serialisable: their digest is the key.
        classes: number of classes.
        fill: writes the silo into a new folder by ``save_silo``.

    Raises:
        DataError: the cached files were altered and cannot be made again, or what ``fill`` raises.
    """
    target = folder / f"{name}-{json_digest(facts)[:_KEY_LENGTH]}"
    return open_sealed(target, fill, lambda found: open_silo(found, classes))
