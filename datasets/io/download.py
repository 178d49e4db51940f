"""Download a data set's files from its public source, each checked before it gets its name."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from datasets.io.atomic_files import write_atomically
from datasets.io.digests import md5_of
from datasets.io.locations import PublicFiles
from models.contract.errors import DataError


def fetch(source: PublicFiles, data_dir: Path, base_url: str = "") -> Iterator[str]:
    """Bring the files of ``source`` into ``data_dir``; yield a line about each.

    Args:
        source: what to bring; its files' MD5 are the publisher's.
        data_dir: the data directory; the source's own folder is made in it.
        base_url: another place with the same file names, ending in '/'.

    Raises:
        DataError: a download failed, or a checksum differs.
    """
    folder = data_dir / source.folder
    for file in source.files:
        target = folder / file.name
        if target.is_file() and md5_of(target.read_bytes()) == file.md5:
            yield f"{target}: there already, checksum right"
            continue
        content = _download((base_url or source.url) + file.name)
        checksum = md5_of(content)
        if checksum != file.md5:
            raise DataError(
                f"{file.name} from {base_url or source.url} has MD5 {checksum}, not {file.md5}: "
                "nothing was written; try again or name another --base-url"
            )
        write_atomically(target, content)
        yield f"{target}: {len(content):,} bytes, checksum right"


def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            content: bytes = reply.read()
            return content
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise DataError(
            f"{url} cannot be downloaded ({reason}): check the network or name another --base-url"
        ) from None
