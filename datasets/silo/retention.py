"""The bound of a cache's size: folders that were not opened for longest go first.

Only folders of derived data are counted and removed (silos, decoded sources), never weights that
lie in the same cache. They are safe to remove: a reader that finds none makes its own.
"""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedsilo.datasets.io.sealed_folders import SEAL

_DEPTHS = ("*", "*/*")  # a decoded source; a silo in its data set's folder
# Their names end with a key, and while they are made or removed with something random: nothing else
# is touched, whatever folder is given
_KEYED = re.compile(r"[^.].*-[0-9a-f]{16}")
_BEGUN = re.compile(r"\..*-[0-9a-f]{16}\.\w{8}")
_FACTS = "silo.json"  # of a silo that an earlier version made, without a seal
_ABANDONED = 24 * 3600.0  # seconds after which what was being made, or removed, no longer is


@dataclass(frozen=True)
class Pruned:
    """What was removed, oldest first, and the bytes of all folders that are left."""

    removed: tuple[Path, ...]
    left_bytes: int


def prune_cache(folder: Path, keep_bytes: int, in_use: Collection[Path] = ()) -> Pruned:
    """Remove folders from a cache, the longest unopened first, until it keeps to its bound.

    Other processes may open, make and remove folders meanwhile. A folder first gets another name,
    so that nobody opens half of it; one that is open stays readable until it is closed.

    Args:
        folder: the cache directory.
        keep_bytes: what all folders of derived data may take together.
        in_use: folders that stay (``Silo.folder``), though the bound be passed.
    """
    _remove_abandoned(folder)
    found = {path: (_last_use(path), _bytes(path)) for path in _derived(folder)}
    spared = {path.resolve() for path in in_use}
    left = sum(size for _, size in found.values())
    removed = []
    for path, (_, size) in sorted(found.items(), key=lambda item: item[1][0]):
        if left <= keep_bytes:
            break
        if path.resolve() not in spared and _remove(path):
            removed.append(path)
            left -= size
    return Pruned(tuple(removed), left)


def _derived(folder: Path) -> Iterator[Path]:
    """Yield the folders of derived data, none through a link."""
    for depth in _DEPTHS:
        for path in _found(folder, depth):
            linked = path.is_symlink() or (path.parent != folder and path.parent.is_symlink())
            made = any((path / name).is_file() for name in (SEAL, _FACTS))
            if made and not linked and _KEYED.fullmatch(path.name):
                yield path


def _found(folder: Path, depth: str) -> list[Path]:
    """Return what matches; what vanishes meanwhile may hide others until the next time."""
    with suppress(FileNotFoundError):
        return list(folder.glob(depth))
    return []


def _last_use(path: Path) -> int:
    """Return when a folder was last opened, in ns: each opening sets its time."""
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _bytes(path: Path) -> int:
    size = 0
    for file in _below(path):
        with suppress(OSError):
            size += file.lstat().st_size if file.is_file() else 0
    return size


def _below(path: Path) -> list[Path]:
    """Return what lies below a folder; nothing if it vanishes while it is looked through."""
    with suppress(OSError):
        return list(path.rglob("*"))
    return []


def _remove(path: Path) -> bool:
    """Remove a folder; tell whether it is gone, also if a rival was faster."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes that were killed had begun to make or to remove."""
    for depth in _DEPTHS:
        for path in _found(folder, depth):
            begun = _BEGUN.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
            if begun and _age(path) > _ABANDONED:
                shutil.rmtree(path, ignore_errors=True)


def _age(path: Path) -> float:
    """Return the seconds since something in a folder last changed."""
    newest = max(map(_last_use, [path, *_below(path)]))
    return time.time() - newest / 1e9
