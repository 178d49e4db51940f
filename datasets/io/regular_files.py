"""Open files that must be plain files: neither a pipe, a socket, a device nor a symbolic link.

A pipe in place of a file would block whoever opens it for ever, and a link could lead anywhere.
"""

import errno
import os
import stat
from pathlib import Path

_NOT_REGULAR = "it is not a regular file"


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
        # ENXIO: the system found a socket, or a pipe that nobody reads
        faults = {errno.ELOOP: "it is a symbolic link", errno.ENXIO: _NOT_REGULAR}
        raise OSError(
            error.errno, faults.get(error.errno or 0, error.strerror), str(path)
        ) from None
    found = os.fstat(handle).st_mode
    if stat.S_ISREG(found):
        return handle
    os.close(handle)
    # A pipe with a reader, a device, or a folder, which the system opens for reading
    fault = os.strerror(errno.EISDIR) if stat.S_ISDIR(found) else _NOT_REGULAR
    raise OSError(errno.EISDIR, fault, str(path))


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file; errors as ``open_regular``."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        return file.read()
