"""Files of public sources: their origin, their terms, and whether they are on this machine."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.files.yaml_text import read_own_yaml

Origin = Literal["public", "own", "made-up"]
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


@dataclass(frozen=True)
class RemoteFile:
    """A file of a public source.

    Attributes:
        name: its name there and here.
        md5: the checksum that its publisher gives.
        size: in bytes, 0 if it is not known.
        unpacked: the folder of the data directory ("" for itself) into which an archive is
            unpacked; None for other files.
    """

    name: str
    md5: str
    size: int = 0
    unpacked: str | None = None


@dataclass(frozen=True)
class PublicFiles:
    """A public data set: its source, the terms of its use, and its files, if they can be fetched.

    Attributes:
        name: the data set's name.
        url: where the files come from, ending in '/'; without files where the licence is stated.
        licence: its name, as the source states it or as it is known.
        terms: what a user must agree to before a download, besides giving credit, or an empty
            string.
        size: bytes of a download, about, where no files are named; 0 if the source does not say.
        folder: where the files are in the data directory.
        files: the files.
    """

    name: str
    url: str
    licence: str
    terms: str = ""
    size: int = 0
    folder: str = ""
    files: tuple[RemoteFile, ...] = ()

    def advice(self) -> str:
        """Describe how to get the files, for errors."""
        return f"run 'fedsilo fetch {self.name} --data-dir DIR' (public source: {self.url})"

    def data_dir(self, places: Places) -> Path:
        """Return the data directory, or raise a ``DataError`` if none is named."""
        if places.data is None:
            raise DataError(
                f"data set '{self.name}' needs files, but no data directory is named: set "
                f"'data.dir' or $FEDSILO_DATA, or {self.advice()}"
            )
        return places.data

    def find(self, places: Places, names: Iterable[str] | None = None) -> Path:
        """Return the folder of the files, of which ``names`` (by default all) must be there.

        Raises:
            DataError: a file is missing; names it, its folder and the public source.
        """
        if not self.files:
            return Path()
        folder = self.data_dir(places) / self.folder
        for name in names or [file.name for file in self.files]:
            if not (folder / name).is_file():
                raise DataError(f"{name} is missing in {folder}: {self.advice()}")
        return folder

    def bytes(self) -> int:
        """Return the size of a download in bytes, or 0 if the size is not known."""
        sizes = [file.size for file in self.files]
        if self.size or not all(sizes):
            return self.size
        return sum(sizes)

    def size_text(self) -> str:
        """Write the size with a unit, such as '12.3 MB'."""
        size = self.bytes()
        for unit, name in _UNITS:
            if size >= unit:
                return f"{size / unit:.3g} {name}"
        if size == 0:
            return "not stated"
        return f"{size} bytes"

    def lines(self) -> Iterator[str]:
        """Yield licence, source, size and terms, a line each."""
        yield f"licence: {self.licence}"
        yield f"source: {self.url}"
        yield f"size: {self.size_text()}"
        yield f"terms: {self.terms or 'none beyond the licence'}"

    def refuse_unaccepted(self, accepted: bool) -> None:
        """Refuse to download what has terms unless they are ``accepted``, by a ``DataError``."""
        if self.terms and not accepted:
            raise DataError(
                f"data set '{self.name}' has terms ({self.terms}; {self.url}), but they are not "
                "accepted: nothing was downloaded; repeat with --accept-licence if you agree"
            )


@cache
def public_data() -> Mapping[str, PublicFiles]:
    """Return the public data sets in ``datasets/public.yaml``, by name."""
    table = read_own_yaml(Path(__file__).parent.parent / "public.yaml")
    sources = {}
    for name, entry in table.items():
        files = tuple(RemoteFile(**file) for file in entry.pop("files", ()))
        sources[name] = PublicFiles(name, files=files, **entry)
    return sources
