"""The places of files: the data directory, the cache, and weights in both."""

import os
from dataclasses import dataclass
from pathlib import Path

from fedsilo.core.errors import DataError

BACKBONES = "backbones"  # in the cache directory, where `fedsilo pretrain` writes


def installed_folder() -> Path:
    """Find the folder of the Flower app: it holds pyproject.toml, the five folders and the package.

    In a checkout it is the repository. In an installed fedsilo it is the package itself, because
    the five folders lie in it.
    """
    package = Path(__file__).resolve().parents[2]
    if (package / "server_app").is_dir():
        return package
    return package.parent


@dataclass(frozen=True)
class Places:
    """The folder of data files, None if no folder is named, and the folder of derived files."""

    data: Path | None
    cache: Path


def find_places(data_dir: str, cache_dir: str) -> Places:
    """Resolve the two folders from settings, else from FEDSILO_DATA and FEDSILO_CACHE."""
    cache = cache_dir or os.environ.get("FEDSILO_CACHE", "") or "~/.cache/fedsilo"
    data = data_dir or os.environ.get("FEDSILO_DATA", "")
    if not data:
        return Places(None, Path(cache).expanduser())
    return Places(Path(data).expanduser(), Path(cache).expanduser())


def data_folder(places: Places, name: str, needs: str) -> Path:
    """Return the data directory, or raise a ``DataError`` if none is named.

    The error says that the data set ``name`` ``needs`` such a folder.
    """
    if places.data is None:
        raise DataError(
            f"data set '{name}' needs a folder {needs}: set 'data.dir' or $FEDSILO_DATA"
        )
    return places.data


def weight_paths(named: str, places: Places) -> list[Path]:
    """Return the possible paths of a weights file: in the cache, then in the data directory.

    If ``named`` is an absolute path, it is the only one.
    """
    given = Path(named).expanduser()
    if given.is_absolute():
        return [given]
    paths = [places.cache / BACKBONES / given]
    if places.data:
        paths.append(places.data / given)
    return paths
