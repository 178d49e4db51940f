"""Where things lie: the data directory with its public files, the cache, weights in both."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedsilo.models.contract.errors import DataError

BACKBONES = "backbones"  # in the cache directory, where `fedsilo pretrain` writes


@dataclass(frozen=True)
class Places:
    """Where data files lie (``data``, may be unnamed) and where decoded ones go (``cache``)."""

    data: Path | None
    cache: Path


def find_places(data_dir: str, cache_dir: str) -> Places:
    """Resolve the two folders from settings, else from FEDSILO_DATA and FEDSILO_CACHE."""
    data = data_dir or os.environ.get("FEDSILO_DATA", "")
    cache = cache_dir or os.environ.get("FEDSILO_CACHE", "") or "~/.cache/fedsilo"
    return Places(Path(data).expanduser() if data else None, Path(cache).expanduser())


def data_folder(places: Places, name: str, needs: str) -> Path:
    """Return the data directory.

    Args:
        places: the two folders.
        name: the data set's name, for the error.
        needs: what the data directory must hold, for the error.

    Raises:
        DataError: none is named.
    """
    if places.data is None:
        raise DataError(
            f"data set '{name}' needs a folder {needs}: set 'data-dir' or $FEDSILO_DATA"
        )
    return places.data


def weight_paths(named: str, places: Places) -> list[Path]:
    """Return where a file of weights may lie: in the cache, then in the data directory.

    Args:
        named: its name, or a path; an absolute one is the only place.
        places: the two folders.
    """
    given = Path(named).expanduser()
    folders = [places.cache / BACKBONES] + ([places.data] if places.data else [])
    return [given] if given.is_absolute() else [folder / given for folder in folders]


@dataclass(frozen=True)
class RemoteFile:
    """A file of a public source, with the checksum that its publisher gives.

    ``size`` is its bytes, 0 where they are not known. An archive is ``unpacked`` into that folder
    of the data directory ("" is itself); of other files it is None.
    """

    name: str
    md5: str
    size: int = 0
    unpacked: str | None = None


class PublicFiles(Protocol):
    """Files of a public source: their folder in the data directory, and where they come from."""

    @property
    def name(self) -> str:
        """The data set's name."""
        ...

    @property
    def folder(self) -> str:
        """The folder of the files in the data directory."""
        ...

    @property
    def url(self) -> str:
        """The public source, ending in '/'."""
        ...

    @property
    def licence(self) -> str:
        """The licence, as the source states it or as it is known."""
        ...

    @property
    def terms(self) -> str:
        """What a user must agree to before they are brought; empty: nothing."""
        ...

    @property
    def files(self) -> tuple[RemoteFile, ...]:
        """The files."""
        ...


def fetch_advice(source: PublicFiles) -> str:
    """Return how to get the files of ``source``, for errors."""
    return f"run 'fedsilo fetch {source.name} --data-dir DIR' (public source: {source.url})"


def find_files(source: PublicFiles, places: Places, names: Iterable[str] | None = None) -> Path:
    """Return the folder of the source's files, of which ``names`` (all) must be there.

    Raises:
        DataError: a file is missing; names it, the folder looked in and the public source.
    """
    if not source.files:
        return Path()
    advice = fetch_advice(source)
    if places.data is None:
        raise DataError(
            f"data set '{source.name}' needs files, and no data directory is named: set "
            f"'data-dir' or $FEDSILO_DATA, or {advice}"
        )
    folder = places.data / source.folder
    for name in names or [file.name for file in source.files]:
        if not (folder / name).is_file():
            raise DataError(f"{name} is missing in {folder}: {advice}")
    return folder
