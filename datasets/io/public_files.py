"""Files of public sources: where they come from, on what terms, and whether they are here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedsilo.datasets.io.locations import Places
from fedsilo.models.contract.errors import DataError

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
    """Files of a public source.

    Attributes:
        name: the data set's name.
        folder: where the files are in the data directory.
        url: the public source, ending in '/'.
        licence: as the source states it or as it is known.
        terms: what a user must agree to before a download, or an empty string.
        files: the files.
    """

    name: str
    folder: str = ""
    url: str = ""
    licence: str = ""
    terms: str = ""
    files: tuple[RemoteFile, ...] = ()

    def advice(self) -> str:
        """Return how to get the files, for errors."""
        return f"run 'fedsilo fetch {self.name} --data-dir DIR' (public source: {self.url})"

    def data_dir(self, places: Places) -> Path:
        """Return the data directory, or raise a ``DataError`` if none is named."""
        if places.data is None:
            raise DataError(
                f"data set '{self.name}' needs files, and no data directory is named: set "
                f"'data-dir' or $FEDSILO_DATA, or {self.advice()}"
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

    def size(self) -> int:
        """Return the bytes of all files, or 0 if that of one is not known."""
        sizes = [file.size for file in self.files]
        return sum(sizes) if all(sizes) else 0


@dataclass(frozen=True)
class Licence:
    """The licence of a public data set.

    Attributes:
        licence: its name, as the source states it or as it is known.
        source: where that is stated, or where the files come from.
        size: bytes of a download, about; 0 if the source does not say.
        terms: what a user must agree to before a download beside giving credit, or an empty string.
    """

    licence: str
    source: str
    size: int = 0
    terms: str = ""

    def size_text(self) -> str:
        """Return the size as people say it."""
        for unit, name in _UNITS:
            if self.size >= unit:
                return f"{self.size / unit:.3g} {name}"
        return f"{self.size} bytes" if self.size else "not stated"

    def lines(self) -> Iterator[str]:
        """Yield licence, source, size and terms, a line each."""
        yield f"licence: {self.licence}"
        yield f"source: {self.source}"
        yield f"size: {self.size_text()}"
        yield f"terms: {self.terms or 'none beyond the licence'}"


def licence_of(files: PublicFiles) -> Licence:
    """Return the licence of public files, with the size of all together."""
    return Licence(files.licence, files.url, files.size(), files.terms)


def refuse_unaccepted(name: str, licence: Licence, accepted: bool) -> None:
    """Refuse to download a data set whose terms nobody has agreed to.

    Raises:
        DataError: names the terms and the option that accepts them.
    """
    if licence.terms and not accepted:
        raise DataError(
            f"data set '{name}' has terms ({licence.terms}; {licence.source}): nothing was "
            "downloaded; repeat with --accept-licence if you agree"
        )
