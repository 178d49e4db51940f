"""The places of files: the data folder, the cache folder, and weights in both."""

import os
from dataclasses import dataclass
from pathlib import Path

from fedsilo.core.errors import DataError

BACKBONES = "backbones"  # a folder in the cache, where `fedsilo pretrain` writes


def installed_folder() -> Path:
    """Return the folder of the Flower app, which contains the folder ``server_app``.

    An installed package ``fedsilo`` contains ``server_app`` itself, so it is the result. Otherwise
    the result is the parent of the package, which is the repository in a checkout.
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

    If an argument is empty, $FEDSILO_DATA or $FEDSILO_CACHE is used in its place. If that variable
    is empty or not set, the data folder is None, and the cache folder is ~/.cache/fedsilo. A '~' is
    expanded. The folders need not exist.
    """
    cache = cache_dir or os.environ.get("FEDSILO_CACHE", "") or "~/.cache/fedsilo"
    data = data_dir or os.environ.get("FEDSILO_DATA", "")
    if not data:
        return Places(None, Path(cache).expanduser())
    return Places(Path(data).expanduser(), Path(cache).expanduser())


def data_folder(places: Places, name: str, needs: str) -> Path:
    """Return the data folder, or raise an error if the user has named none.

    Whether the folder exists is not checked.

    Args:
        places: the folders that the user has named.
        name: the data set that needs the folder, for the error.
        needs: the content that the folder must have, for the error. These words follow "needs a
            folder", such as "with one CSV file per site".

    Raises:
        DataError: no data folder is named.
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
        named: the file, relative to these folders. If it is an absolute path or begins with '~', it
            is the only path in the list.
        places: the data folder and the cache folder.
    """
    given = Path(named).expanduser()
    if given.is_absolute():
        return [given]
    paths = [places.cache / BACKBONES / given]
    if places.data:
        paths.append(places.data / given)
    return paths
