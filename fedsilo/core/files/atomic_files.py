"""Files read and written safely: only regular files are opened, and a file is complete or absent.

Opening a pipe instead of a file would block for ever, and a symbolic link could lead anywhere. New
files and folders are written under a temporary name, then renamed. If a process is killed while
writing, the next process that writes the same file or folder reuses or removes its remains.
"""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)  # the numbers of an OSError if a disk or a quota is full
_DISK = (*FULL, errno.EFBIG, errno.EIO, errno.EROFS)
_NOT_REGULAR = "it is not a regular file"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # some network file systems
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)  # a folder is renamed to one that has content


def open_regular(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a regular file and return its descriptor. A pipe raises an error instead of blocking.

    Args:
        path: the file, which must not be a symbolic link itself.
        flags: flags as for ``os.open``, such as ``os.O_RDONLY``.
        mode: the permissions of a new file.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    safe = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(path, flags | safe, mode)
    except OSError as error:
        # ENXIO: the system found a socket, or a pipe that nobody reads
        faults = {errno.ELOOP: "it is a symbolic link", errno.ENXIO: _NOT_REGULAR}
        raise OSError(
            error.errno, faults.get(error.errno or 0, error.strerror), str(path)
        ) from None
    # The open file is examined: by its path, another file could take its place after the check
    found = os.fstat(handle).st_mode
    if stat.S_ISREG(found):
        return handle
    os.close(handle)
    # A pipe with a reader, a device, or a folder, which the system opens for reading
    fault = os.strerror(errno.EISDIR) if stat.S_ISDIR(found) else _NOT_REGULAR
    raise OSError(errno.EISDIR, fault, str(path))


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError if ``open_regular`` does."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read()


@contextmanager
def naming(name: Path | str) -> Iterator[None]:
    """Name the file in each disk error that the ``with`` block raises.

    An OSError without a file name gets ``name`` if the disk is full, failing or read-only. A
    used-up quota and a too large file count as well. Other errors are not changed. Every error is
    raised again.
    """
    try:
        yield
    except OSError as error:
        _put_name(error, name)
        raise


def _put_name(error: OSError, name: Path | str) -> None:
    """Set the file name of an error about the disk, if it lacks one (see ``naming``)."""
    # NumPy raises an OSError without a number if only a part of an array was written
    is_of_disk = error.errno in _DISK or "requested and" in str(error)
    if error.filename is None and is_of_disk:
        error.filename = str(name)


def write_atomically(
    path: Path, content: bytes | str, mode: int = 0o644, *, lasting: bool = True
) -> None:
    """Write ``content`` to ``path`` so that a reader sees either the old content or all of the new.

    Args:
        path: the file. Missing parent folders are made.
        content: bytes, or a string for UTF-8.
        mode: the file's permissions.
        lasting: whether the new content must survive a power cut.

    Raises:
        OSError: the file cannot be written. An earlier file is then unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, handle = _open_part(path)
    try:
        with os.fdopen(handle, "wb") as file:
            try:
                # A killed process may have left a part that is longer than the new content
                file.truncate()
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                if lasting:
                    os.fsync(handle)
                # Before the renaming, so that no reader is refused by the part's mode, 0600
                os.fchmod(handle, mode)
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    # Closing the file writes again what did not fit, so its error comes last
    except OSError as error:
        _put_name(error, path)
        raise


def _open_part(path: Path) -> tuple[Path, int]:
    """Open and lock the temporary file ``.<name>.part``, which later replaces ``path``.

    The function waits for other processes. The file keeps its old content, so the caller must
    truncate it. If the file system has no locks, a file with a random name is opened instead.
    """
    temporary = path.with_name(f".{path.name}.part")
    while True:
        handle = open_regular(temporary, os.O_WRONLY | os.O_CREAT)
        try:
            locked = _lock(handle)
            # Another process may have renamed the file while this one waited for its lock
            with suppress(FileNotFoundError):
                if locked and os.path.samestat(os.fstat(handle), temporary.stat()):
                    os.fchmod(handle, 0o600)
                    return temporary, handle
        except BaseException:
            os.close(handle)
            raise
        # Another process had the file and has finished, or no file can be locked here
        os.close(handle)
        if not locked:
            temporary.unlink(missing_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            return Path(name), handle


@contextmanager
def hold_name(path: Path) -> Iterator[bool]:
    """Reserve a path while the ``with`` block runs, and yield whether this process holds the path.

    The block gets False if another process holds the path. If the file system has no locks, it gets
    True. Missing parent folders are made. A parent folder made here is removed after the block if
    it is empty.
    """
    held, is_new_parent = path.with_name(f".{path.name}.held"), not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = _lock_name(held)
    if handle is None:
        yield False
        return
    try:
        yield True
    finally:
        # Removed while it is locked; who opened it before finds that it is gone, and makes another
        held.unlink(missing_ok=True)
        os.close(handle)
        if is_new_parent:
            with suppress(OSError):  # a run is in it, or another process has begun one
                path.parent.rmdir()


def _lock_name(held: Path) -> int | None:
    """Lock a file that serves only as a lock, without waiting for other processes.

    A missing file is created. The result is the open descriptor, or None if another process holds
    the lock. If the file system has no locks, the file is only opened.
    """
    while True:
        handle = open_regular(held, os.O_WRONLY | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                os.close(handle)
                raise
            return handle
        # The process that had it may have removed it after it was opened here
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), held.stat()):
                return handle
        os.close(handle)


def _lock(handle: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file or folder by ``flock``, and return whether it is now locked.

    By default the function waits for other processes. With the flag ``LOCK_NB``, it returns False
    if another process holds the lock. If the file system has no locks, it returns False too.
    """
    try:
        fcntl.flock(handle, operation)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, *_WITHOUT_LOCKS):
            raise
        return False
    return True


@contextmanager
def scratch_folder(folder: Path, name: str) -> Iterator[Path]:
    """Make a temporary folder in ``folder`` for the ``with`` block, and yield its path.

    The name is ``.<name>.part-`` plus a random ending. The folder is removed after the block, even
    after an error. Older folders of the same ``name`` that killed processes left behind are removed
    first.
    """
    prefix = f".{name}.part-"
    with _open_folder(folder) as parent, ExitStack() as held:
        # Without this lock, another process could remove the new folder before it is locked
        _lock(parent)
        for left in [path for path in folder.iterdir() if path.name.startswith(prefix)]:
            _remove_left(left)
        made = held.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix=prefix))
        _lock(held.enter_context(_open_folder(Path(made))))
        # The lock of ``folder`` ends here, but the new folder keeps its own until the block ends
        later = held.pop_all()
    with later:
        yield Path(made)


def _remove_left(scratch: Path) -> None:
    """Remove a temporary folder that a killed process left behind.

    The folder stays if a process has locked it, or if the file system has no locks. A missing
    folder, or a file that cannot be removed, raises no error.
    """
    with suppress(FileNotFoundError, NotADirectoryError), _open_folder(scratch) as handle:
        if _lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    """Open a folder, yield its descriptor for locking, and close it after the ``with`` block."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def build_folder(target: Path, fill: Callable[[Path], None], *, replace: bool = False) -> None:
    """Let ``fill`` write a new folder under a temporary name, then rename it to ``target``.

    If ``target`` has content at the renaming, it stays, and no error is raised.

    Args:
        target: the new folder's path.
        fill: writes the content into the empty folder that it gets.
        replace: whether to remove an existing ``target`` before the renaming.

    Raises:
        OSError: the folder cannot be written or renamed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with naming(target), scratch_folder(target.parent, target.name) as scratch:
        work = scratch / "folder"
        work.mkdir()
        fill(work)
        if replace:
            # Another process may have moved the folder
            with suppress(FileNotFoundError):
                target.rename(scratch / "before")
        try:
            work.rename(target)
        except OSError as error:
            # Another process was faster; both built the same content from the same key
            if error.errno in _OCCUPIED:
                return
            # The folder of before comes back, unless another process has made one since
            with suppress(OSError):
                (scratch / "before").rename(target)
            raise
