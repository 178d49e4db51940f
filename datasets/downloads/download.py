"""Download public files with pooch, verify their MD5 before use, and unpack archives safely."""

import gzip
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from fedsilo.core.errors import DataError
from fedsilo.core.files.atomic_files import FULL, scratch_folder
from fedsilo.core.files.unpacked_size import check_members, check_unpacked, copy_member
from fedsilo.core.one_line import one_line
from fedsilo.datasets.downloads.public_files import PublicFiles, RemoteFile

_TIMEOUT = 60  # seconds without a byte
# Bytes of memory and of headers that a tar's member takes besides its content
_MEMBER_BYTES = 1024
# Bytes of a long name or of a PAX header
_LONGEST_HEADER = 2**20
_HEADERS = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
)
# Errors for damaged archives; the last three come from the modules' inner code
_DAMAGES = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error),
    *(EOFError, RuntimeError, ValueError),
)


def fetch(source: PublicFiles, data_dir: Path, base_url: str = "") -> Iterator[str]:
    """Download the missing files of a public data set, and unpack those that are archives.

    A file that already exists with the right MD5 is not downloaded again. An archive is not
    unpacked again if its files already exist with the right sizes. The work begins only when the
    result is iterated.

    Args:
        source: the public data set. Its files go into its folder below ``data_dir``, which is
            created.
        data_dir: the data directory.
        base_url: the address of a mirror with files of the same names. '' means ``source.url``.

    Yields:
        A line about the data set's source and licence. Then, for each file, a line that says
        whether the file was downloaded or already existed, and for an archive another line about
        unpacking. A data set without files yields nothing.

    Raises:
        DataError: a download fails, an MD5 differs, or an archive cannot be unpacked.
    """
    from pooch import file_hash

    url = base_url or source.url
    if source.files:
        size = ""
        if source.bytes():
            size = f", {source.bytes():,} bytes"
        yield f"{source.name} from {url}{size}; licence: {source.licence}"
    for file in source.files:
        target = data_dir / source.folder / file.name
        if target.is_file() and file_hash(str(target), "md5") == file.md5:
            yield f"{target}: there already, checksum right"
        else:
            _download(url, file, target)
            yield f"{target}: {target.stat().st_size:,} bytes, checksum right"
        # '' is a folder as well: the data directory itself
        if file.unpacked is not None:
            yield _unpack_once(target, data_dir / file.unpacked)


def _download(base_url: str, file: RemoteFile, target: Path) -> None:
    """Download a file into a scratch folder, and move it to ``target`` once its MD5 is right.

    The address is ``base_url``, a slash and the file's name.

    Raises:
        DataError: the address cannot be read, the disk is full, or the MD5 differs. ``target`` is
            then unchanged.
    """
    from pooch import HTTPDownloader, file_hash

    url = f"{base_url.rstrip('/')}/{file.name}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(target.parent, file.name) as work:
        fresh = work / file.name
        try:
            HTTPDownloader(timeout=_TIMEOUT)(url, str(fresh), None)
        except (OSError, ValueError) as error:  # errors of requests are OSErrors
            fault = (
                f"{url} cannot be downloaded ({_cause(error)}): check the network or name "
                "another --base-url"
            )
            if isinstance(error, OSError) and error.errno in FULL:
                fault = (
                    f"{target} cannot be written ({error.strerror}): make room there, or name "
                    "another data directory"
                )
            raise DataError(fault) from None
        # MD5, because that is the checksum that most publishers give
        checksum = file_hash(str(fresh), "md5")
        if checksum != file.md5:
            raise DataError(
                f"{file.name} from {base_url} must have MD5 {file.md5}, but has {checksum}: "
                "nothing was written; try again or name another --base-url"
            )
        # Within one file system this is atomic: readers find the old file, the new one or none
        fresh.replace(target)


def _cause(error: BaseException) -> str:
    """Return a short text for the innermost error, because outer errors only repeat the address."""
    while error.__context__:
        error = error.__context__
    return getattr(error, "strerror", None) or one_line(error, 200)


def _unpack_once(archive: Path, folder: Path) -> str:
    if is_unpacked(archive, folder):
        return f"{archive}: unpacked already into {folder}"
    return f"{archive}: {unpack(archive, folder):,} files unpacked into {folder}"


def unpack(archive: Path, folder: Path) -> int:
    """Unpack a zip or tar archive into ``folder``, and return the number of unpacked files.

    The folder is created if it is missing. Existing files of the same names are replaced, but only
    after the whole archive was unpacked. A damaged archive therefore changes no existing file.
    Empty folders in the archive are not created.

    Raises:
        DataError: the archive is missing or damaged, contains a link or a path outside its folder,
            or is larger than allowed when unpacked (by default 1 GiB). The error is also raised if
            a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with scratch_folder(folder, "unpacked") as work, _open_archive(archive) as (opened, sizes):
            if isinstance(opened, tarfile.TarFile):
                _extract_tar(opened, work)
            else:
                _extract_zip(archive, opened, sizes, work)
            # Files are moved only after all were unpacked, so a bad archive changes nothing
            for name in sizes:
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                (work / name).replace(target)
            return len(sizes)
    except OSError as error:
        raise DataError(
            f"{archive} cannot be unpacked into {folder} ({error.strerror}): make room there, or "
            "name another data directory"
        ) from None


def _extract_tar(tar: tarfile.TarFile, work: Path) -> None:
    """Unpack a tar archive into ``work``, after ``_open_archive`` has checked its names and sizes.

    Python's extraction filter 'data' checks the names again, and raises a ``tarfile.FilterError``
    for a dangerous name. Old versions of Python without this filter skip the second check.
    """
    if hasattr(tarfile, "data_filter"):
        tar.extractall(work, filter="data")
    else:
        tar.extractall(work)


def _extract_zip(archive: Path, zipped: zipfile.ZipFile, sizes: Iterable[str], work: Path) -> None:
    """Unpack files from a zip archive into the folder ``work``.

    The unpacked bytes are counted, because a zip may state false sizes. When their sum exceeds the
    limit, unpacking stops. The files unpacked until then stay in ``work``.

    Args:
        archive: the zip's path, for errors.
        zipped: the opened zip.
        sizes: the names of the files to unpack.
        work: the folder to unpack into.

    Raises:
        DataError: the unpacked files together are larger than allowed (by default 1 GiB).
    """
    total = 0
    for name in sizes:
        target = work / name
        target.parent.mkdir(parents=True, exist_ok=True)
        total += copy_member(archive, zipped, zipped.getinfo(name), target)
        check_unpacked(archive, total)


def is_unpacked(archive: Path, folder: Path) -> bool:
    """Tell whether every file in an archive already exists in ``folder``, with the same size.

    The contents are not compared. The answer is True for an archive without files.

    Raises:
        DataError: the archive is damaged or too large when unpacked (by default above 1 GiB), or
            contains a link or a path outside its folder.
        OSError: the archive is missing or cannot be read.
    """
    with _open_archive(archive) as (_, sizes):
        for name, size in sizes.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != size:
                return False
    return True


@contextmanager
def _open_archive(
    archive: Path,
) -> Iterator[tuple[zipfile.ZipFile | tarfile.TarFile, dict[str, int]]]:
    """Open a zip or tar archive for a ``with`` block, after checking all entries in it.

    An archive may also prove damaged while the block reads it. The block then ends with the same
    ``DataError``.

    Yields:
        The open archive, and a dictionary: name of a file in the archive -> its size in bytes.
        Folders are not included.

    Raises:
        DataError: the archive is damaged or too large when unpacked (by default above 1 GiB), or
            contains a link, a device or a path outside its folder. In a zip, a compression method
            other than none and deflate is also refused.
    """
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                entries = []
                for entry in zipped.infolist():
                    entries.append((entry.filename, entry.file_size, _is_plain(entry)))
                check_members(archive, zipped.infolist())
                yield zipped, _check_entries(entries, archive)
        else:
            with tarfile.open(archive, tarinfo=_Member) as tar:
                entries = []
                for member in _count_members(tar, archive):
                    # Folders are made for the files in them
                    if not member.isdir():
                        entries.append((member.name, member.size, member.isreg()))
                yield tar, _check_entries(entries, archive)
    except _DAMAGES as error:
        raise DataError(
            f"{archive} is truncated or not an archive ({type(error).__name__}): remove it and "
            "download it again"
        ) from None


class _Member(tarfile.TarInfo):
    """A tar member that refuses overlong headers and sparse files.

    ``tarfile`` reads a long name or PAX header of any size into memory at once, and reads as much
    of a sparse file as its map states.
    """

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        is_long = self.type in _HEADERS and self.size > _LONGEST_HEADER
        if is_long or self.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("a header that is too long, or a sparse file")
        return super()._proc_member(tar)  # type: ignore[misc,no-any-return]

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise tarfile.ReadError("a sparse file")


def _count_members(tar: tarfile.TarFile, archive: Path) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar archive, and stop with an error when they are too large together.

    Each member adds its unpacked size, and 1024 bytes for its header, to the total. The total is
    checked before each member is yielded. A small file that would unpack to a huge one is therefore
    refused early. ``archive`` is the path that the error shows.

    Raises:
        DataError: the members together are larger than allowed when unpacked (by default 1 GiB).
    """
    size = 0
    for member in tar:
        # Millions of empty members would fill memory and disk as well, so each one counts
        size += member.size + _MEMBER_BYTES
        check_unpacked(archive, size)
        yield member


def _is_plain(entry: zipfile.ZipInfo) -> bool:
    kind = stat.S_IFMT(entry.external_attr >> 16)  # 0 where a system without modes made it
    return entry.filename.endswith("/") or kind in (0, stat.S_IFREG)


def _check_entries(entries: Iterable[tuple[str, int, bool]], archive: Path) -> dict[str, int]:
    """Check the names and kinds of an archive's entries, and return the sizes of its files.

    Args:
        entries: for each entry its name, its size in bytes, and a flag. The flag is True for a
            plain file and for a folder, and False for a link and a device. A folder's name ends in
            '/'.
        archive: the archive's path, for errors.

    Returns:
        File name -> size in bytes, in the archive's order, without folders. If a name appears
        twice, the later size counts.

    Raises:
        DataError: an entry is a link or a device, or has a bad name. A name is bad if it is empty,
            is absolute, or contains a backslash or the folder '..'.
    """
    sizes = {}
    for name, size, plain in entries:
        path = PurePosixPath(name)
        fault = ""
        if not name or path.is_absolute() or ".." in path.parts or "\\" in name:
            fault = "a path outside its folder"
        elif not plain:
            fault = "a link or a device"
        if fault:
            raise DataError(
                f"{archive} holds {fault}, {name[:80]!r}: nothing was unpacked; remove the archive"
            )
        if not name.endswith("/"):
            sizes[name] = size
    return sizes
