"""Archives: what comes out, and what never leaves its folder."""

import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import DataError
from fedsilo.datasets.downloads.download import is_unpacked, unpack
from tests.support.archives import write_tar, write_zip
from tests.support.colour import read_or_refused
from tests.support.errors import refuses

FILES = {"set/one.bin": b"first", "set/deep/two.csv": b"a;b\n" * 300}


Writer = Callable[[Path, dict[str, bytes]], Path]
both = pytest.mark.parametrize("write", [write_tar, write_zip])


def _held(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@both
def test_the_files_of_an_archive_come_into_the_folder(tmp_path: Path, write: Writer) -> None:
    archive = write(tmp_path / "archive", FILES)
    folder = tmp_path / "data"
    assert not is_unpacked(archive, folder)
    assert unpack(archive, folder) == 2
    assert _held(folder) == FILES
    assert is_unpacked(archive, folder)
    (folder / "set" / "one.bin").write_bytes(b"firs")
    assert not is_unpacked(archive, folder)


@both
def test_what_is_there_beside_them_stays(tmp_path: Path, write: Writer) -> None:
    archive = write(tmp_path / "archive", FILES)
    (tmp_path / "data" / "set").mkdir(parents=True)
    (tmp_path / "data" / "set" / "own.txt").write_bytes(b"mine")
    (tmp_path / "data" / "set" / "one.bin").write_bytes(b"older")
    unpack(archive, tmp_path / "data")
    assert _held(tmp_path / "data") == {**FILES, "set/own.txt": b"mine"}


@both
@pytest.mark.parametrize(
    "name", ["../out.bin", "/tmp/out.bin", "set/../../out.bin", "set\\..\\out"]
)
def test_a_path_outside_the_folder_is_refused_and_nothing_is_unpacked(
    tmp_path: Path, write: Writer, name: str
) -> None:
    archive = write(tmp_path / "archive", {**FILES, name: b"x"})
    with pytest.raises(DataError, match="holds a path outside its folder") as caught:
        unpack(archive, tmp_path / "data")
    assert "\n" not in str(caught.value)
    assert _held(tmp_path) == {"archive": archive.read_bytes()}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar_are_refused(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "archive", "w:gz") as tar:
        entry = tarfile.TarInfo("set/link")
        entry.type, entry.linkname = kind, "/etc/passwd"
        tar.addfile(entry)
    with refuses(DataError, "set/link"):
        unpack(tmp_path / "archive", tmp_path / "data")
    assert _held(tmp_path / "data") == {}


def test_a_file_without_a_name_in_a_zip_is_refused(tmp_path: Path) -> None:
    content = write_zip(tmp_path / "archive", {"set/one": b"1"}).read_bytes()
    (tmp_path / "archive").write_bytes(content.replace(b"set/one", b"\0et/one"))
    with pytest.raises(DataError, match="holds a path outside its folder, ''"):
        unpack(tmp_path / "archive", tmp_path / "data")
    assert _held(tmp_path / "data") == {}


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "archive", "w") as zipped:
        entry = zipfile.ZipInfo("set/link")
        entry.external_attr = 0o120777 << 16
        zipped.writestr(entry, "/etc/passwd")
    with pytest.raises(DataError, match="holds a link or a device"):
        unpack(tmp_path / "archive", tmp_path / "data")


@both
@given(keep=st.floats(0, 1))
def test_an_archive_cut_short_is_refused_and_nothing_is_unpacked(
    tmp_path_factory: pytest.TempPathFactory, write: Writer, keep: float
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    content = write(folder / "archive", FILES).read_bytes()
    # Beyond, what is lost of a tar file is zeros that end it, and gzip's checksum
    (folder / "archive").write_bytes(content[: int(keep * 0.6 * len(content))])
    with pytest.raises(DataError, match="is truncated or not an archive"):
        unpack(folder / "archive", folder / "data")
    assert _held(folder / "data") == {}


@both
@given(place=st.floats(0, 0.999), value=st.integers(0, 255))
def test_an_altered_archive_is_unpacked_whole_or_refused(
    tmp_path_factory: pytest.TempPathFactory, write: Writer, place: float, value: int
) -> None:
    folder = tmp_path_factory.mktemp("altered")
    content = bytearray(write(folder / "archive", FILES).read_bytes())
    content[int(place * len(content))] = value
    (folder / "archive").write_bytes(content)
    count = read_or_refused(lambda: unpack(folder / "archive", folder / "data"))
    assert len(_held(folder / "data")) == (count or 0)
    assert {path.name for path in folder.iterdir()} == {"archive", "data"}


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    archive = write_zip(tmp_path / "archive", FILES)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "set").write_bytes(b"a file where the folder should be")
    with pytest.raises(DataError, match="cannot be unpacked into"):
        unpack(archive, tmp_path / "data")
