"""Open files that must be plain files: neither a pipe, a socket, a device nor a symbolic link.

A pipe in place of a file would block whoever opens it for ever, and a link could lead anywhere.
"""

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a regular file without ever waiting for it, and return its descriptor.

    Args:
        path: the file. Its last part must not be a symbolic link; earlier parts may be.
        flags: as ``os.open`` takes them.
        mode: permissions of a file that is made.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    safe = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(path, flags | safe, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a symbolic link", str(path)) from None
        if error.errno == errno.ENXIO:  # a socket, or a pipe that nobody reads
            raise OSError(error.errno, "it is not a regular file", str(path)) from None
        raise
    found = os.fstat(handle).st_mode
    if not stat.S_ISREG(found):
        os.close(handle)
        if stat.S_ISDIR(found):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file; errors as ``open_regular``."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read()
