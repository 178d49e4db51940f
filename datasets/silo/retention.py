"""Keep a cache within its size limit by removing the folders that were not opened for longest.

Only folders of derived data (silos, decoded sources) are counted and removed, never the weights in
the same cache. A process that does not find its folder creates it again.
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
# Names of derived folders end with a key of 16 hexadecimal digits; while a folder is being made or
# removed its name is hidden and ends with 8 random ones. Nothing else is touched in any folder
_KEYED = re.compile(r"[^.].*-[0-9a-f]{16}")
_BEGUN = re.compile(r"\..*-[0-9a-f]{16}\.\w{8}")
_ABANDONED = 24 * 3600.0  # seconds; an older folder is no longer being made or removed


def prune_cache(folder: Path, keep_bytes: int) -> list[Path]:
    """Remove the least recently opened folders of a cache until the rest fits into ``keep_bytes``.

    Incomplete folders older than a day are removed first. Then the sizes of complete folders are
    added up, which hold silos or decoded images. Other processes may use the cache at the same
    time. They cannot open a folder that is being deleted, and files that they have open stay
    readable.

    Returns:
        The removed complete folders, the least recently opened first. A folder that cannot be
        renamed for its deletion stays.
    """
    for path in _list_entries(folder):
        # A process that was killed leaves a half-made folder behind. The newest entry in it tells
        # whether somebody may still be writing
        begun = _BEGUN.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        if begun and time.time() - max(map(_change_time, [path, *_below(path)])) > _ABANDONED:
            shutil.rmtree(path, ignore_errors=True)
    sizes = {}
    for path in _list_entries(folder):
        if _is_derived(path, folder):
            sizes[path] = _bytes(path)
    # Folders that any process is removing have hidden names, and so do not count here
    left = sum(sizes.values())
    removed = []
    for path in sorted(sizes, key=_change_time):
        if left <= keep_bytes:
            break
        if _remove(path):
            removed.append(path)
            left -= sizes[path]
    return removed


def _list_entries(folder: Path) -> Iterator[Path]:
    """Yield the files and folders in the cache at depth 1, and then those at depth 2.

    If another process removes an entry during the search, all entries of this depth may be left
    out.
    """
    for depth in _DEPTHS:
        with suppress(FileNotFoundError):
            yield from list(folder.glob(depth))


def _is_derived(path: Path, folder: Path) -> bool:
    """Tell whether a folder is sealed, has a keyed name and is not reached by a symbolic link."""
    linked = path.is_symlink() or (path.parent != folder and path.parent.is_symlink())
    return bool(_KEYED.fullmatch(path.name)) and (path / SEAL).is_file() and not linked


def _change_time(path: Path) -> float:
    """Return a path's modification time in seconds, 0 if it vanished; opening a silo updates it."""
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
    """List all entries below a folder, at any depth, or return [] if the folder vanishes."""
    with suppress(OSError):
        return list(path.rglob("*"))
    return []


def _remove(path: Path) -> bool:
    """Remove a folder that other processes may be using, and return whether it is gone.

    The folder is first renamed to a hidden random name, so that no process can open it. The result
    is False only if renaming failed. It is True if another process removed the folder, or if hidden
    files remain.
    """
    # Renaming is atomic: from then on no process can open the folder, but open files stay readable
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True
