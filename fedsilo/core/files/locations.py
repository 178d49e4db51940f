"""The places of files: the data directory, the cache, and weights in both."""

import os
from dataclasses import dataclass
from pathlib import Path

from fedsilo.core.errors import DataError

BACKBONES = "backbones"  # in the cache directory, where `fedsilo pretrain` writes


def installed_folder() -> Path:
    """Return the folder of the Flower app, which contains the folder ``server_app``.

    In an installed fedsilo this is the package itself. In a checkout it is the package's parent,
    the repository, which also holds pyproject.toml.
    """
    package = Path(__file__).resolve().parents[2]
    if (package / "server_app").is_dir():
        return package
    return package.parent


@dataclass(frozen=True)
class Places:
    """The two folders that files are read from and written to.

    Attributes:
        data: the folder of data files; None if none is named.
        cache: the folder of files that are derived from them.
    """

    data: Path | None
    cache: Path


def find_places(data_dir: str, cache_dir: str) -> Places:
    """Find the data folder and the cache folder: from settings, otherwise from the environment.

    The variables are FEDSILO_DATA and FEDSILO_CACHE. If neither names a folder, the data folder is
    None, and the cache is ~/.cache/fedsilo. The folders need not exist.
    """
    cache = cache_dir or os.environ.get("FEDSILO_CACHE", "") or "~/.cache/fedsilo"
    data = data_dir or os.environ.get("FEDSILO_DATA", "")
    if not data:
        return Places(None, Path(cache).expanduser())
    return Places(Path(data).expanduser(), Path(cache).expanduser())


def data_folder(places: Places, name: str, needs: str) -> Path:
    """Return the data folder, without checking that it exists.

    For the error, ``name`` is the data set, and ``needs`` is what its folder must contain.

    Raises:
        DataError: no data folder is named.
    """
    if places.data is None:
        raise DataError(
            f"data set '{name}' needs a folder {needs}: set 'data.dir' or $FEDSILO_DATA"
        )
    return places.data


def weight_paths(named: str, places: Places) -> list[Path]:
    """List the paths where a weights file may be, in the order they are tried.

    The file may be in the cache's folder of backbones, then in the data folder if one is named. If
    ``named`` is an absolute path, it is the only path in the list.
    """
    given = Path(named).expanduser()
    if given.is_absolute():
        return [given]
    paths = [places.cache / BACKBONES / given]
    if places.data:
        paths.append(places.data / given)
    return paths
