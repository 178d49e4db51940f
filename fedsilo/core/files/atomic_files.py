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
        path: the file, which must not be a symbolic link itself. Its folders may be links.
        flags: flags as for ``os.open``, such as ``os.O_RDONLY``. Flags that prevent blocking and
            the following of a link are added.
        mode: permissions of a file that is created.

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
    """Add a file's name to errors about the disk that the ``with`` block raises.

    An OSError gets ``name`` if it has no file name and one of these causes: the disk is full,
    failing or read-only, a quota is used up, or the file is too large. Other errors are not
    changed. Every error is raised again.
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

    Processes that write the same path take turns, and the file keeps the content written last.

    Args:
        path: the file. Missing parent folders are made.
        content: bytes, or a string, which is written as UTF-8.
        mode: the permissions that the file gets, even if an earlier file had others.
        lasting: whether to synchronise the content to the disk before it replaces the old file. A
            power cut then leaves no empty or incomplete file.

    Raises:
        OSError: the file cannot be written. The content of an earlier file is then unchanged. If
            the disk is full or fails, the error names ``path``.
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
    """Open the temporary file that later replaces ``path``, and lock it.

    The file is ``.<name>.part`` in the same folder, with permissions 0600. It is created if it is
    missing. Otherwise its old content stays, so the caller must truncate it. The function waits for
    the file's lock, so no other process writes to the file. If the file system does not support
    locks, a new file with a random name is opened instead, and ``.<name>.part`` is removed.

    Returns:
        The temporary file's path and its open descriptor.

    Raises:
        OSError: the file cannot be opened or locked.
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

    The block runs even if another process holds the path, and then gets False. If the file system
    does not support locks, the block gets True although nothing is reserved.

    The lock is on the file ``.<name>.held`` next to ``path``, whose missing parent folders are
    created. After a block with True, the lock file is removed. The parent folder is removed too if
    it was missing before and is empty now.
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

    The file is created if it is missing. If another process removes the file just before this
    process locks it, the function starts again. If the file system does not support locks, the file
    is only opened.

    Args:
        held: the path of the file.

    Returns:
        The open descriptor; None if another process holds the lock.

    Raises:
        OSError: the file cannot be opened or locked.
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

    By default the function waits for other processes. It returns False if the file system does not
    support locks. With the flag ``LOCK_NB``, it also returns False if another process holds the
    lock. Other OSErrors are raised.

    Args:
        handle: the descriptor of the open file or folder. Closing it ends the lock.
        operation: flags as for ``fcntl.flock``.
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

    The new folder is called ``.<name>.part-`` plus a random ending. It is locked during the block,
    and removed after the block, even after an error. Older folders of the same ``name`` are removed
    first unless they are locked, because killed processes left them behind. ``folder`` must exist.
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

    The folder stays if a process has locked it, because that process still uses it. It also stays
    if the file system does not support locks. A missing folder raises no error, and neither does a
    file that cannot be removed.
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

    Missing parent folders are made. With ``replace``, an existing ``target`` is first moved aside,
    and deleted after the renaming. If ``target`` is a folder with content when the new folder is
    renamed, another process was faster. That process's folder then stays, the new one is deleted,
    and no error is raised. After any other failure of the renaming, the old folder comes back.

    Args:
        target: the new folder's path.
        fill: gets the path of an empty folder and writes the content into it.
        replace: whether to replace an existing ``target``.

    Raises:
        OSError: the folder cannot be written or renamed. If the disk is full or fails, the error
            names ``target``.
        Exception: any error that ``fill`` raises. The unfinished folder is removed.
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
