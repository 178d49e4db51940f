"""The places of files: the data directory, the cache, and weights in both."""

import os
from dataclasses import dataclass
from pathlib import Path

from fedsilo.core.errors import DataError

BACKBONES = "backbones"  # in the cache directory, where `fedsilo pretrain` writes


def installed_folder() -> Path:
    """Return the folder of the Flower app.

    In a checkout it is the repository, which holds pyproject.toml, the five rooms and the package.
    In an installed fedsilo it is the package itself, because the five rooms lie in it.
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

    The variables are FEDSILO_DATA and FEDSILO_CACHE. Without a name there is no data folder, and
    the cache is ~/.cache/fedsilo.
    """
    cache = cache_dir or os.environ.get("FEDSILO_CACHE", "") or "~/.cache/fedsilo"
    data = data_dir or os.environ.get("FEDSILO_DATA", "")
    if not data:
        return Places(None, Path(cache).expanduser())
    return Places(Path(data).expanduser(), Path(cache).expanduser())


def data_folder(places: Places, name: str, needs: str) -> Path:
    """Return the data folder.

    ``needs`` says what data set ``name`` looks for in it, for the error.

    Raises:
        DataError: no data folder is named.
    """
    if places.data is None:
        raise DataError(
            f"data set '{name}' needs a folder {needs}: set 'data.dir' or $FEDSILO_DATA"
        )
    return places.data


def weight_paths(named: str, places: Places) -> list[Path]:
    """List the paths where a weights file may be, in the order in which they are tried.

    They are the cache's folder of backbones and the data folder; an absolute path is the only one.
    """
    given = Path(named).expanduser()
    if given.is_absolute():
        return [given]
    paths = [places.cache / BACKBONES / given]
    if places.data:
        paths.append(places.data / given)
    return paths
