"""The bound of a cache's size: folders that were not opened for longest are removed first.

Only folders of derived data (silos, decoded sources) are counted and removed, never weights in the
same cache. A reader that finds none makes its own.
"""

import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fedsilo.core.files.sealed_folders import SEAL

_DEPTHS = ("*", "*/*")  # a decoded source; a silo in its data set's folder
# Their names end with a key, and while they are made or removed with something random: nothing else
# is touched, whatever folder is given
_KEYED = re.compile(r"[^.].*-[0-9a-f]{16}")
_BEGUN = re.compile(r"\..*-[0-9a-f]{16}\.\w{8}")
_ABANDONED = 24 * 3600.0  # seconds after which a folder is no longer being made or removed


def prune_cache(folder: Path, keep_bytes: int) -> list[Path]:
    """Remove folders from a cache, the longest unopened first, and return them.

    As many go as leaves all folders of derived data together within ``keep_bytes``. Other processes
    may open, make and remove folders meanwhile. A folder is renamed first, so that nobody opens
    half of it; one that is open stays readable until it is closed.
    """
    for path in _found(folder):
        begun = _BEGUN.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        if begun and time.time() - max(map(_change_time, [path, *_below(path)])) > _ABANDONED:
            shutil.rmtree(path, ignore_errors=True)
    sizes = {}
    for path in _found(folder):
        if _is_derived(path, folder):
            sizes[path] = _bytes(path)
    left = sum(sizes.values())
    removed = []
    for path in sorted(sizes, key=_change_time):
        if left <= keep_bytes:
            break
        if _remove(path):
            removed.append(path)
            left -= sizes[path]
    return removed


def _found(folder: Path) -> Iterator[Path]:
    """Yield the folders of both depths; one that vanishes may hide others until the next time."""
    for depth in _DEPTHS:
        with suppress(FileNotFoundError):
            yield from list(folder.glob(depth))


def _is_derived(path: Path, folder: Path) -> bool:
    """Return whether a folder holds derived data and is not reached through a link."""
    linked = path.is_symlink() or (path.parent != folder and path.parent.is_symlink())
    return bool(_KEYED.fullmatch(path.name)) and (path / SEAL).is_file() and not linked


def _change_time(path: Path) -> float:
    """Return a file's or folder's time of change in s; opening a sealed folder sets it."""
    with suppress(OSError):
        return path.stat().st_mtime_ns / 1e9
    return 0.0


def _bytes(path: Path) -> int:
    size = 0
    for file in _below(path):
        with suppress(OSError):
            if file.is_file():
                size += file.lstat().st_size
    return size


def _below(path: Path) -> list[Path]:
    """List all entries below a folder; empty if the folder vanishes meanwhile."""
    with suppress(OSError):
        return list(path.rglob("*"))
    return []


def _remove(path: Path) -> bool:
    """Remove a folder; return whether it is gone, also if another process was faster."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True
