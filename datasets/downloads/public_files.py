"""Describe the files of public data sets: source, licence, terms, and presence on this machine."""

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
        name: the file's name, the same at the source and on this machine.
        md5: the checksum that its publisher gives.
        size: size in bytes; 0 if it is not known.
        unpacked: for an archive, the folder within the data directory to unpack into ('' for the
            data directory itself); None for other files.
    """

    name: str
    md5: str
    size: int = 0
    unpacked: str | None = None


@dataclass(frozen=True)
class PublicFiles:
    """A public data set: its source, its terms of use, and its files, if they can be downloaded.

    Attributes:
        name: the data set's name.
        url: the address of the files, ending in '/'; without files, the page that states the
            licence.
        licence: the licence's name, as the source states it or as it is generally known.
        terms: what a user must agree to before a download, besides giving credit; '' for nothing.
        size: approximate bytes of a download if no files are listed; 0 if the source does not say.
        folder: the files' folder within the data directory.
        files: the files; empty if fedsilo cannot download them.
    """

    name: str
    url: str
    licence: str
    terms: str = ""
    size: int = 0
    folder: str = ""
    files: tuple[RemoteFile, ...] = ()

    def advice(self) -> str:
        """Build the hint on how to get the files, for the end of an error message."""
        return f"run 'fedsilo fetch {self.name} --data-dir DIR' (public source: {self.url})"

    def data_dir(self, places: Places) -> Path:
        """Return the data directory that ``places`` names.

        The directory need not exist.

        Raises:
            DataError: ``places.data`` is None, because neither the setting 'data.dir' nor the
                environment variable FEDSILO_DATA names a directory. The error names this data set.
        """
        if places.data is None:
            raise DataError(
                f"data set '{self.name}' needs files, but no data directory is named: set "
                f"'data.dir' or $FEDSILO_DATA, or {self.advice()}"
            )
        return places.data

    def find(self, places: Places, names: Iterable[str] | None = None) -> Path:
        """Check that this public data set's files exist, and return the folder that contains them.

        Only existence is checked, not the MD5. If fedsilo can download no files of this data set,
        nothing is checked, and ``Path()`` is returned.

        Args:
            places: the folders for data and cache. The data directory contains the data set's
                folder.
            names: the names of the files to check. None or an empty list checks all files.

        Raises:
            DataError: no data directory is named, or a file is missing. The error explains how to
                download the data set.
        """
        if not self.files:
            return Path()
        folder = self.data_dir(places) / self.folder
        for name in names or [file.name for file in self.files]:
            if not (folder / name).is_file():
                raise DataError(f"{name} is missing in {folder}: {self.advice()}")
        return folder

    def bytes(self) -> int:
        """Return the number of bytes to download for this data set, or 0 if it is unknown.

        The size that ``public.yaml`` states for the whole data set comes first. Without it, the
        result is the sum of the sizes of all files, or 0 if the size of any file is unknown.
        """
        sizes = [file.size for file in self.files]
        if self.size or not all(sizes):
            return self.size
        return sum(sizes)

    def size_text(self) -> str:
        """Format the size of this data set's download, such as '12.3 MB', or return 'not stated'.

        The number is in GB, MB or kB (powers of 1000) with three significant digits. Below 1000 it
        is in bytes. The result is 'not stated' if the size is unknown.
        """
        size = self.bytes()
        for unit, name in _UNITS:
            if size >= unit:
                return f"{size / unit:.3g} {name}"
        if size == 0:
            return "not stated"
        return f"{size} bytes"

    def lines(self) -> Iterator[str]:
        """Yield licence, source, size and terms as one line of text each."""
        yield f"licence: {self.licence}"
        yield f"source: {self.url}"
        yield f"size: {self.size_text()}"
        yield f"terms: {self.terms or 'none beyond the licence'}"

    def refuse_unaccepted(self, accepted: bool) -> None:
        """Check that the user has accepted this data set's terms, so that a download may begin.

        A data set without terms always passes. ``accepted`` tells whether the user agreed to the
        terms.

        Raises:
            DataError: the data set has terms, and ``accepted`` is false.
        """
        if self.terms and not accepted:
            raise DataError(
                f"data set '{self.name}' has terms ({self.terms}; {self.url}), but they are not "
                "accepted: nothing was downloaded; repeat with --accept-licence if you agree"
            )


@cache
def public_data() -> Mapping[str, PublicFiles]:
    """Read the public data sets from ``datasets/public.yaml``: data set's name -> ``PublicFiles``.

    Each ``PublicFiles`` has the data set's source, licence, terms and files. The list of files is
    empty if fedsilo cannot download the data set. The YAML file is read once per process.
    """
    table = read_own_yaml(Path(__file__).parent.parent / "public.yaml")
    sources = {}
    for name, entry in table.items():
        files = tuple(RemoteFile(**file) for file in entry.pop("files", ()))
        sources[name] = PublicFiles(name, files=files, **entry)
    return sources
