"""Archives unpacked: plain files alone, and none outside the folder that they are meant for."""

from __future__ import annotations

import gzip
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from fedsilo.datasets.io.atomic_files import scratch_folder
from fedsilo.models.contract.errors import DataError

_MOST_BYTES = 2**32  # 8 times GTSRB
_DAMAGES = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error),
    *(EOFError, RuntimeError, ValueError),  # what their modules raise besides
)


@dataclass(frozen=True)
class _Member:
    """An entry of an archive: its path as it says, bytes, whether it is a plain file."""

    name: str
    size: int
    plain: bool
    open: Callable[[], IO[bytes] | None]


def unpack(archive: Path, folder: Path) -> int:
    """Bring the files of a zip or tar archive into ``folder``; return how many they are.

    All are unpacked beside it before the first gets its name, in place of one that has it.

    Raises:
        DataError: the archive is damaged, holds a link or a path outside, or cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (
            scratch_folder(folder, "unpacked") as work,
            _members(archive) as members,
        ):
            for member in members:
                _extract(member, work)
            for member in members:
                target = folder / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                (work / member.name).replace(target)
            return len(members)
    except _DAMAGES as error:
        raise _damaged(archive, error) from None
    except OSError as error:
        raise DataError(f"{archive} cannot be unpacked into {folder}: {error.strerror}") from None


def is_unpacked(archive: Path, folder: Path) -> bool:
    """Tell whether all files of an archive are in ``folder``, by name and size.

    Raises:
        DataError: the archive is damaged, or holds a link or a path outside.
    """
    try:
        with _members(archive) as members:
            targets = [(folder / member.name, member.size) for member in members]
    except _DAMAGES as error:
        raise _damaged(archive, error) from None
    return all(path.is_file() and path.stat().st_size == size for path, size in targets)


def _damaged(archive: Path, error: Exception) -> DataError:
    return DataError(
        f"{archive} is cut short or no archive ({type(error).__name__}): remove it and download it "
        "again"
    )


def _extract(member: _Member, work: Path) -> None:
    target = work / member.name
    target.parent.mkdir(parents=True, exist_ok=True)
    content = member.open()
    if content is None:
        raise ValueError("no content")
    with content, target.open("wb") as file:
        shutil.copyfileobj(content, file)


@contextmanager
def _members(archive: Path) -> Iterator[list[_Member]]:
    """Open an archive and return its files, each of which is fit to be unpacked."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            yield _checked([_of_zip(zipped, entry) for entry in zipped.infolist()], archive)
    else:
        with tarfile.open(archive) as tar:
            entries = [entry for entry in tar.getmembers() if not entry.isdir()]
            yield _checked([_of_tar(tar, entry) for entry in entries], archive)


def _of_zip(zipped: zipfile.ZipFile, entry: zipfile.ZipInfo) -> _Member:
    mode = entry.external_attr >> 16  # 0 where a system without modes made it
    plain = not stat.S_IFMT(mode) or stat.S_ISREG(mode) or entry.is_dir()
    return _Member(entry.filename, entry.file_size, plain, lambda: zipped.open(entry))


def _of_tar(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> _Member:
    return _Member(entry.name, entry.size, entry.isreg(), lambda: tar.extractfile(entry))


def _checked(members: list[_Member], archive: Path) -> list[_Member]:
    """Return the files of ``members``, or refuse the archive by a ``DataError``."""
    for member in members:
        path = PurePosixPath(member.name)
        outside = path.is_absolute() or ".." in path.parts or "\\" in member.name
        if outside or not member.plain:
            what = "a path outside its folder" if outside else "a link or a device"
            raise DataError(
                f"{archive} holds {what}, {member.name[:80]!r}: nothing was unpacked; remove the "
                "archive"
            )
    if sum(member.size for member in members) > _MOST_BYTES:
        raise DataError(f"{archive} holds more than {_MOST_BYTES} bytes: nothing was unpacked")
    return [member for member in members if not member.name.endswith("/")]
