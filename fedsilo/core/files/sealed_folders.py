"""Folders of derived files with a seal: an altered folder is made again and never used.

The seal has a SHA-256 of each file and the folder's name, so that the seal of another folder is
rejected. It is written when the folder is made, and checked whenever the folder is opened. Files
are hashed again only if the size, times or inode of a file changed since the last check. So bits
that a disk loses by itself are not noticed.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from fedsilo.core.errors import DataError
from fedsilo.core.files.atomic_files import build_folder, write_atomically
from fedsilo.core.one_line import one_line

SEAL = "seal.json"
STAMP = "checked.json"

_ATTEMPTS = 10
_SETTLED = 2 * 10**9  # ns: files changed within a tick of the clock have the same times

Read = TypeVar("Read")
Stamps = dict[str, list[int]]


def json_digest(facts: Any) -> str:
    """Return the SHA-256 of ``facts`` as JSON, in hexadecimal. The order of keys counts."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def open_sealed(target: Path, fill: Callable[[Path], None], read: Callable[[Path], Read]) -> Read:
    """Read a folder of cached files. Before that, make the folder if it is missing or was altered.

    A seal, a file with the SHA-256 of every other file, shows whether the folder was altered. The
    folder's modification time is set to now, to mark it as recently used. If another process
    removes the folder during ``read``, the folder is made and read again. At most ten attempts are
    made.

    Args:
        target: the folder.
        fill: writes the files into a new folder, whose path it gets.
        read: reads the folder. It need not check the content, because the seal was checked before.

    Returns:
        The result of ``read``.

    Raises:
        DataError: the folder cannot be made, or was removed during each of ten attempts. The error
            is also raised if ``read`` raises OSError, ValueError or EOFError although the folder is
            still there.
    """
    for _ in range(_ATTEMPTS):
        _ensure_sealed(target, fill)
        # The cache removes the folders that were unused for longest. It may be mounted read-only
        with suppress(OSError):
            os.utime(target)
        opened = _inode_of(target)
        try:
            return read(target)
        except (OSError, ValueError, EOFError) as error:
            # Else another process removed it to keep the cache small, and a third may have made it
            if opened is not None and _inode_of(target) == opened:
                raise DataError(
                    f"the cached data in {target} cannot be read ({one_line(error, 100)}): give "
                    "this user the right to read them, or remove that folder to have them made "
                    "again"
                ) from None
    raise DataError(f"the cached data in {target} are removed as soon as they are made")


def _inode_of(folder: Path) -> int | None:
    """Return a folder's inode, or None if the folder is missing or cannot be examined.

    Callers compare inodes to notice that a folder was replaced, because a folder that is made again
    under the same name usually gets another inode.
    """
    with suppress(OSError):
        return folder.stat().st_ino
    return None


def _ensure_sealed(target: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder and its seal if the folder is missing or does not match its seal.

    The seal is a file with the SHA-256 of every other file. A folder that matches is left as it is,
    and ``fill`` is not called. If the folder does not match, a warning is logged, and the new
    folder replaces it.

    Args:
        target: the folder.
        fill: writes the files into a new folder, whose path it gets.

    Raises:
        DataError: the folder cannot be written, or ``fill`` raises a DataError.
    """

    def make(work: Path) -> None:
        fill(work)
        seal(work, target.name)

    if not target.is_dir():
        try:
            build_folder(target, make)
        except OSError as error:
            fact = f"{target} cannot be written ({one_line(error.strerror or error)})"
            raise DataError(f"{fact}: set 'data.cache-dir' or $FEDSILO_CACHE to another") from None
        return
    # The folder exists, but somebody may have changed a file in it
    reason = fault(target)
    if reason is None:
        return
    log = logging.getLogger("flwr")
    log.warning("fedsilo: the cached data in %s %s: they are made again", target, reason)
    try:
        build_folder(target, make, replace=True)
    except (DataError, OSError) as error:
        raise DataError(
            f"the cached data in {target} {reason} and cannot be made again ({error}): remove "
            "that folder, and check the data that it is made from"
        ) from None


def seal(folder: Path, name: str) -> None:
    """Seal a folder, so that later changes to its files are noticed.

    The seal, ``seal.json``, is a file in the folder with the SHA-256 of each other file. Hidden
    files are not covered.

    Args:
        folder: the folder, which may still have a temporary name.
        name: the folder's final name. The seal contains this name, so the seal of another folder is
            noticed.

    Raises:
        OSError: a file cannot be read, or the seal cannot be written.
    """
    files = {file: file_sha256(folder / file) for file in sorted(_list_files(folder))}
    write_atomically(folder / SEAL, json.dumps({"folder": name, "files": files}), 0o600)


def fault(folder: Path) -> str | None:
    """Describe how a folder differs from its seal, such as "were altered"; None if it does not.

    The seal is a file with the SHA-256 of each other file. The description follows words such as
    "the cached data in <folder>". An unreadable folder or seal gives a description instead of an
    error.

    Every call compares the names of the files with the seal. The contents are hashed only if the
    size, times or inode of a file have changed since the last recorded check. A check without a
    fault is recorded, unless a file changed less than two seconds before it.
    """
    try:
        sealed = _read_seal(folder)
        if sealed.keys() != _list_files(folder):
            return "lack files of their seal, or hold others"
        # Read before the contents, so that a change during the hashing shows at the next check
        stamps = _read_stamps(folder, [*sealed, SEAL])
        if _load_last_stamps(folder) == stamps:
            return None
        began = time.time_ns()
        for name, digest in sealed.items():
            if file_sha256(folder / name) != digest:
                return "were altered"
        # A file that changed within a tick of the clock could change again without a new time, so
        # such a comparison is not remembered
        if all(max(facts[1:3]) < began - _SETTLED for facts in stamps.values()):
            # The cache may be mounted read-only
            with suppress(OSError):
                write_atomically(folder / STAMP, json.dumps(stamps), 0o600)
    except FileNotFoundError:
        return "have no seal"
    except (OSError, ValueError):
        return "cannot be read, or their seal is damaged"
    return None


def _read_seal(folder: Path) -> dict[str, str]:
    """Read the seal of a folder: a mapping from the name of each file to its SHA-256.

    Whether the files match is not checked here.

    Raises:
        FileNotFoundError: the seal or the folder is missing.
        ValueError: the seal is damaged, lists no files, or contains the name of another folder.
    """
    content = json.loads((folder / SEAL).read_text())
    files = None
    if isinstance(content, dict) and content.get("folder") == folder.name:
        files = content.get("files")
    if not isinstance(files, dict) or not files:
        raise ValueError("the seal of another folder, or of no files")
    return files


def _list_files(folder: Path) -> set[str]:
    """Return the names of the files that a seal covers: all except hidden files, SEAL and STAMP."""
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    return names - {SEAL, STAMP}


def _read_stamps(folder: Path, names: Iterable[str]) -> Stamps:
    """Read the size, times and inode of files, to see later whether a file may have changed.

    Args:
        folder: the folder of the files.
        names: the names of the files.

    Returns:
        File name -> [size in bytes, modification time, change time, inode], with times in ns.

    Raises:
        FileNotFoundError: one of the files is missing.
    """
    stamps = {}
    for name in names:
        facts = (folder / name).stat()
        stamps[name] = [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]
    return stamps


def _load_last_stamps(folder: Path) -> Any:
    """Return the size, times and inode of each file, as the last check of the folder recorded them.

    The result is None if no record exists or it cannot be read. The form of the record is not
    checked.
    """
    with suppress(OSError, ValueError):
        return json.loads((folder / STAMP).read_text())
    return None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
