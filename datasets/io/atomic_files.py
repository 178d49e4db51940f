"""Files and folders that are whole or absent: written under a temporary name, then renamed.

What a killed process left half-written is taken over, or removed, by the next that writes there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # some network file systems


def write_atomically(
    path: Path, content: bytes | str, mode: int = 0o644, *, lasting: bool = True
) -> None:
    """Write ``content`` to ``path`` so that no reader ever sees a part of it.

    ``lasting``: it is on the disk when this returns, and outlasts a power cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with becoming(path, mode, lasting=lasting) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def becoming(path: Path, mode: int = 0o644, *, lasting: bool = True) -> Iterator[BinaryIO]:
    """Yield an empty file that becomes ``path`` when its block ends without an error.

    Two that write the same path do so one after the other.
    """
    temporary, handle = _held(path)
    with os.fdopen(handle, "wb") as file:
        try:
            file.truncate()
            yield file
            file.flush()
            if lasting:
                os.fsync(handle)
            os.fchmod(handle, mode)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _held(path: Path) -> tuple[Path, int]:
    """Open the unfinished file of ``path`` for this process alone."""
    temporary = path.with_name(f".{path.name}.part")
    while True:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            locked = _locked(handle)
            if locked and _is_at(temporary, handle):
                os.fchmod(handle, 0o600)
                return temporary, handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # it was another's, who has finished meanwhile, or nobody can hold it
        if not locked:
            temporary.unlink(missing_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            return Path(name), handle


def _is_at(path: Path, handle: int) -> bool:
    """Tell whether an open file is still the one of that name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False


def _locked(handle: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file or folder; return whether it could be."""
    try:
        fcntl.flock(handle, operation)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, *_WITHOUT_LOCKS):
            raise
        return False
    return True


@contextmanager
def scratch_folder(folder: Path, name: str) -> Iterator[Path]:
    """Yield a new folder ``.<name>.part-...`` in ``folder``, which goes at the end of its block.

    Those of its name that a killed process left go first.
    """
    prefix = f".{name}.part-"
    with _opened(folder) as parent, ExitStack() as held:
        _locked(parent)  # nobody takes a folder for left that is not locked yet
        for left in [path for path in folder.iterdir() if path.name.startswith(prefix)]:
            _remove_left(left)
        made = held.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix=prefix))
        _locked(held.enter_context(_opened(Path(made))))
        later = held.pop_all()
    with later:
        yield Path(made)


def _remove_left(scratch: Path) -> None:
    """Remove a scratch folder that no living process holds."""
    with suppress(FileNotFoundError, NotADirectoryError), _opened(scratch) as handle:
        if _locked(handle, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def build_folder(target: Path, fill: Callable[[Path], None], *, replace: bool = False) -> None:
    """Let ``fill`` write a new folder, then move it to ``target``.

    Args:
        target: where it is to be.
        fill: writes into a folder.
        replace: whether a folder that is there goes; else it, a rival's copy, is kept.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(target.parent, target.name) as scratch:
        work = scratch / "folder"
        work.mkdir()
        fill(work)
        if replace:
            with suppress(FileNotFoundError):  # a rival moved it
                target.rename(scratch / "before")
        try:
            work.rename(target)
        except OSError:
            # Another process was faster; both built the same content from the same key.
            if not target.is_dir():
                raise
