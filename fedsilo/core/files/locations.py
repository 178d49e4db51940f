"""The places of files: the data folder, the cache folder, and weights in both."""

import os
from dataclasses import dataclass
from pathlib import Path

from fedsilo.core.errors import DataError

BACKBONES = "backbones"  # a folder in the cache, where `fedsilo pretrain` writes


def installed_folder() -> Path:
    """Return the folder of the Flower app, which contains the folder ``server_app``.

    After an installation, this is the folder of the package ``fedsilo``. If that folder has no
    ``server_app``, as in a checkout, the result is its parent folder, the repository.
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
        cache: the folder of files that are derived from the data files.
    """

    data: Path | None
    cache: Path


def find_places(data_dir: str, cache_dir: str) -> Places:
    """Return the data folder and the cache folder, from the arguments or the environment.

    An empty ``data_dir`` is replaced by $FEDSILO_DATA. If that is empty or not set, the data folder
    is None. An empty ``cache_dir`` is replaced by $FEDSILO_CACHE, or else by ~/.cache/fedsilo. A
    '~' is expanded. The folders need not exist.
    """
    cache = cache_dir or os.environ.get("FEDSILO_CACHE", "") or "~/.cache/fedsilo"
    data = data_dir or os.environ.get("FEDSILO_DATA", "")
    if not data:
        return Places(None, Path(cache).expanduser())
    return Places(Path(data).expanduser(), Path(cache).expanduser())


def data_folder(places: Places, name: str, needs: str) -> Path:
    """Return the data folder that the user has named. Whether it exists is not checked.

    Args:
        places: the folders that the user has named.
        name: the name of the data set, for the error.
        needs: the content that the folder must have, for the error. These words follow "needs a
            folder", such as "with one CSV file per site".

    Raises:
        DataError: the user has named no data folder.
    """
    if places.data is None:
        raise DataError(
            f"data set '{name}' needs a folder {needs}: set 'data.dir' or $FEDSILO_DATA"
        )
    return places.data


def weight_paths(named: str, places: Places) -> list[Path]:
    """List the paths where a file of network weights may be, in the order in which they are tried.

    The first path is in the cache's folder ``backbones``, to which ``fedsilo pretrain`` writes. The
    second is in the data folder, if there is one. Whether the files exist is not checked.

    Args:
        named: the file, relative to ``backbones`` and to the data folder. If it is an absolute path
            or begins with '~', it is the only path in the list.
        places: the data folder and the cache folder.
    """
    given = Path(named).expanduser()
    if given.is_absolute():
        return [given]
    paths = [places.cache / BACKBONES / given]
    if places.data:
        paths.append(places.data / given)
    return paths
