"""Limits the size of unpacked files: one limit for every packed form that a command reads.

A few kB can unpack to gigabytes of memory or disk. Each reader of a packed form first calls
``check_unpacked`` with the size in the file's header. Because a header may be false,
``read_member`` also counts the bytes of a zip's member while they are inflated.

The limit is 1 GiB, or 16 times the file's size on disk if that is more, because honest large files
are packed less than 16 times. The holes of a sparse file do not count. A user who trusts a file
that is packed more tightly can raise the limit by the environment variable
``FEDSILO_MOST_UNPACKED``.
"""

import os
import zipfile
from collections.abc import Iterable
from pathlib import Path

from fedsilo.core.errors import DataError, SettingError

VARIABLE = "FEDSILO_MOST_UNPACKED"
USUAL = 2**30  # bytes
TIMES = 16  # the limit in multiples of the file's size on disk
CELL_BYTES = 100  # least memory of a table's cell: a text and two references
_PART = 2**20  # bytes that are inflated at once
_BLOCK = 512  # bytes of one block in st_blocks, on every file system
# The allowed compression methods of a member, because zipfile inflates all others in one piece
PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def most_unpacked(path: Path) -> int:
    """Return the largest allowed size, in bytes, of the unpacked content of a file.

    The size is $FEDSILO_MOST_UNPACKED or, if that is not set, 1 GiB. It is at least 16 times the
    file's size on disk. Only allocated blocks count as size on disk, so a sparse file has a small
    one. A missing file counts as 0 bytes.

    Raises:
        SettingError: $FEDSILO_MOST_UNPACKED is not a whole number above 0.
    """
    given = os.environ.get(VARIABLE, "")
    if given and not (given.isdecimal() and int(given)):
        raise SettingError(f"{VARIABLE} is '{given[:40]}', but it must be a whole number of bytes")
    limit = int(given or USUAL)
    try:
        on_disk = path.stat().st_blocks * _BLOCK
    except OSError:  # reading the file later raises a better error
        on_disk = 0
    return max(limit, TIMES * on_disk)


def unpacked_fault(path: Path, size: int) -> str | None:
    """Explain why unpacking a file to ``size`` bytes is refused; None if it is allowed.

    The limit is $FEDSILO_MOST_UNPACKED or, if that is not set, 1 GiB. It is at least 16 times the
    file's size on disk. The explanation follows the file's path.
    """
    most = most_unpacked(path)
    if size <= most:
        return None
    return (
        f"would have {size:,} bytes unpacked, but at most {most:,} are allowed: if you "
        f"trust it, set the environment variable {VARIABLE} to more bytes"
    )


def check_unpacked(path: Path, size: int) -> None:
    """Check that a packed file does not unpack to more bytes than ``most_unpacked`` allows.

    By default, the limit is 1 GiB.

    Args:
        path: the packed file.
        size: its unpacked size in bytes, from its header or as counted during unpacking.

    Raises:
        DataError: ``size`` is above the limit. The error explains how to raise the limit.
    """
    fault = unpacked_fault(path, size)
    if fault:
        raise DataError(f"{path} {fault}")


def check_members(path: Path, entries: Iterable[zipfile.ZipInfo]) -> None:
    """Check that a zip's members are stored or deflated, and that their total size is allowed.

    The total is the sum of the sizes that the zip states. No member unpacks to more than its stated
    size, because zipfile stops there. Other compression methods are refused, because zipfile could
    unpack more bytes at once than requested.

    Raises:
        DataError: a member has another compression method, or the stated sizes together are more
            than ``most_unpacked`` allows.
    """
    size = 0
    for entry in entries:
        if entry.compress_type not in PACKINGS:
            raise DataError(
                f"{path}: '{entry.filename[:80]}' is packed by another method than 'deflate': "
                "pack it again"
            )
        size += entry.file_size
    check_unpacked(path, size)


def read_member(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Unpack a zip's member and return its content, counting the bytes while they are inflated.

    Raises:
        DataError: the member has more bytes than ``most_unpacked(path)`` allows (1 GiB by default).
    """
    content = bytearray()
    with archive.open(entry) as member:
        # The size in the entry may be false, so the bytes are counted part by part
        for part in iter(lambda: member.read(_PART), b""):
            content += part
            check_unpacked(path, len(content))
    return bytes(content)


def copy_member(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, to: Path) -> int:
    """Unpack a zip's member to the file ``to``, and return the number of bytes.

    An existing file ``to`` is overwritten.

    Raises:
        DataError: the member has more bytes than ``most_unpacked(path)`` allows (1 GiB by default).
            The file ``to`` is then left incomplete.
    """
    size = 0
    with archive.open(entry) as member, to.open("wb") as file:
        # The size in the entry may be false, so the bytes are counted part by part
        for part in iter(lambda: member.read(_PART), b""):
            size += len(part)
            check_unpacked(path, size)
            file.write(part)
    return size
