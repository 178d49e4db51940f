"""Download a data set's files from its public source, each checked before it gets its name."""

from __future__ import annotations

import hashlib
import http.client
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fedsilo.datasets.io.archives import is_unpacked, unpack
from fedsilo.datasets.io.atomic_files import becoming
from fedsilo.datasets.io.digests import md5_of_file
from fedsilo.datasets.io.locations import PublicFiles, RemoteFile
from fedsilo.models.contract.errors import DataError

_PART = 2**20  # bytes


def fetch(source: PublicFiles, data_dir: Path, base_url: str = "") -> Iterator[str]:
    """Bring the files of ``source`` into ``data_dir``; yield a line about each, and the licence.

    Args:
        source: what to bring; its files' MD5 are the publisher's.
        data_dir: the data directory; the source's own folder is made in it.
        base_url: another place with the same file names.

    Raises:
        DataError: a download failed, a checksum differs, or an archive cannot be unpacked.
    """
    if source.files:
        sizes = [file.size for file in source.files]
        size = f", {sum(sizes):,} bytes" if all(sizes) else ""
        yield f"{source.name} from {base_url or source.url}{size}; licence: {source.licence}"
    for file in source.files:
        target = data_dir / source.folder / file.name
        if target.is_file() and md5_of_file(target) == file.md5:
            yield f"{target}: there already, checksum right"
        else:
            written = _download(base_url or source.url, file, target)
            yield f"{target}: {written:,} bytes, checksum right"
        if file.unpacked is not None:
            yield _unpacked(target, data_dir / file.unpacked)


def _unpacked(archive: Path, folder: Path) -> str:
    if is_unpacked(archive, folder):
        return f"{archive}: unpacked already into {folder}"
    return f"{archive}: {unpack(archive, folder):,} files unpacked into {folder}"


def _download(base_url: str, file: RemoteFile, target: Path) -> int:
    """Bring a file to ``target``, whole or not at all; return its bytes."""
    url = f"{base_url.rstrip('/')}/{file.name}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with becoming(target) as written:
        checksum = _copied(url, written)
        if checksum != file.md5:
            raise DataError(
                f"{file.name} from {base_url} has MD5 {checksum}, not {file.md5}: nothing was "
                "written; try again or name another --base-url"
            )
        return written.tell()


def _copied(url: str, written: BinaryIO) -> str:
    """Write what ``url`` holds, part by part, and return its MD5."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            while part := reply.read(_PART):
                digest.update(part)
                written.write(part)
            if reply.length:  # read by parts, a connection that broke off is no error by itself
                raise http.client.IncompleteRead(b"", reply.length)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise DataError(
            f"{url} cannot be downloaded ({reason}): check the network or name another --base-url"
        ) from None
    return digest.hexdigest()
