import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as budget
from hypothesis import strategies as st

from fedsilo.core.errors import DataError
from fedsilo.core.files import sealed_folders
from fedsilo.core.files.sealed_folders import SEAL, STAMP, fault, open_sealed
from tests.support.errors import refuses

CONTENT = {"inputs.npy": b"\x93NUMPY rows of a patient", "labels.npy": b"0110", "facts.json": b"{}"}
YEAR = 365 * 24 * 3600


def fill(folder: Path) -> None:
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)


def read(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in CONTENT}


def never(folder: Path) -> None:
    raise AssertionError("it was made again")


def refuse(folder: Path) -> None:
    raise DataError("the images are gone")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    open_sealed(tmp_path / "site-1", fill, read)
    return tmp_path / "site-1"


def test_a_folder_is_made_once_and_opened_from_then_on(target: Path) -> None:
    assert open_sealed(target, never, read) == CONTENT
    assert sorted(path.name for path in target.iterdir()) == sorted([*CONTENT, SEAL])


def _flip(folder: Path, data: st.DataObject) -> None:
    path = folder / data.draw(st.sampled_from([*CONTENT, SEAL]))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)


def _truncate(folder: Path, data: st.DataObject) -> None:
    path = folder / data.draw(st.sampled_from([*CONTENT, SEAL]))
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])


def _lengthen(folder: Path, data: st.DataObject) -> None:
    path = folder / data.draw(st.sampled_from(list(CONTENT)))
    path.write_bytes(path.read_bytes() + data.draw(st.binary(min_size=1, max_size=9)))


def _exchange(folder: Path, data: st.DataObject) -> None:
    one, other = data.draw(st.permutations([*CONTENT, SEAL]))[:2]
    (folder / one).rename(folder / "held")
    (folder / other).rename(folder / one)
    (folder / "held").rename(folder / other)


def _remove(folder: Path, data: st.DataObject) -> None:
    (folder / data.draw(st.sampled_from([*CONTENT, SEAL]))).unlink()


def _add(folder: Path, data: st.DataObject) -> None:
    (folder / data.draw(st.sampled_from(["other.npy", "silo.json"]))).write_bytes(b"x")


def _another_folder(folder: Path, data: st.DataObject) -> None:
    """Put a whole folder, made of other data under another name, in its place."""

    def fill_other(made: Path) -> None:
        for name in CONTENT:
            (made / name).write_bytes(b"another site's " + name.encode())

    other = folder.with_name("site-2")
    open_sealed(other, fill_other, read)
    shutil.rmtree(folder)
    other.rename(folder)


ALTERATIONS = [_flip, _truncate, _lengthen, _exchange, _remove, _add, _another_folder]


@pytest.mark.parametrize("alter", ALTERATIONS)
@budget(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_nothing_altered_is_ever_read(
    target: Path, alter: Callable[[Path, st.DataObject], None], data: st.DataObject
) -> None:
    alter(target, data)
    unharmed = target.is_dir() and not fault(target)  # such as a space of the seal's JSON
    if not unharmed:
        with refuses(DataError, target):
            open_sealed(target, refuse, read)
    assert open_sealed(target, never if unharmed else fill, read) == CONTENT
    assert fault(target) is None


def test_making_again_is_one_line_in_this_machines_own_log(
    target: Path, own_log: io.StringIO
) -> None:
    (target / "labels.npy").write_bytes(b"0111")
    open_sealed(target, fill, read)
    said = own_log.getvalue()
    assert said == f"fedsilo: the cached data in {target} were altered: they are made again\n"
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_folder_without_a_seal_is_made_again(tmp_path: Path, own_log: io.StringIO) -> None:
    old = tmp_path / "site-1"
    old.mkdir()
    fill(old)
    (old / "labels.npy").write_bytes(b"1111")
    assert open_sealed(old, fill, read) == CONTENT
    assert "have no seal: they are made again" in own_log.getvalue()


def test_folder_that_cannot_be_made_again_stays_and_is_reported(target: Path) -> None:
    (target / "labels.npy").write_bytes(b"0111")
    with pytest.raises(DataError, match=r"remove that folder, and check the data"):
        open_sealed(target, refuse, read)
    assert (target / "labels.npy").read_bytes() == b"0111"
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_a_cache_that_cannot_be_written_is_one_line_that_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with refuses(DataError, "cache-dir"):
        open_sealed(tmp_path / "file" / "cache" / "site-1", fill, read)


def test_a_folder_removed_while_it_is_opened_is_made_again(target: Path) -> None:
    lost: list[Path] = []

    def lose_once(folder: Path) -> dict[str, bytes]:
        if not lost:
            lost.append(folder)
            shutil.rmtree(folder)
            raise FileNotFoundError("a file is missing")
        return read(folder)

    assert open_sealed(target, fill, lose_once) == CONTENT

    def lose(folder: Path) -> dict[str, bytes]:
        shutil.rmtree(folder)
        raise FileNotFoundError("a file is missing")

    with pytest.raises(DataError, match="removed as soon as they are made"):
        open_sealed(target, fill, lose)


def test_opening_is_a_use(target: Path) -> None:
    os.utime(target, (0, 0))
    open_sealed(target, never, read)
    assert target.stat().st_mtime > YEAR


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of files that are hashed from now on."""
    names: list[str] = []
    whole = sealed_folders.file_sha256

    def counted(path: Path) -> str:
        names.append(path.name)
        return whole(path)

    monkeypatch.setattr(sealed_folders, "file_sha256", counted)
    return names


def _settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_folders, "_SETTLED", -YEAR * 10**9)


def test_files_are_hashed_again_only_if_one_changed_since(
    target: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fault(target) is None
    assert len(hashed) == len(CONTENT)
    assert not (target / STAMP).exists(), "changed a moment ago: its times say nothing yet"
    _settle(monkeypatch)
    assert fault(target) is None
    hashed.clear()
    assert fault(target) is None
    assert hashed == []
    path = target / "labels.npy"
    stamp = path.stat()
    path.write_bytes(b"0111")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # the time of change tells it still
    assert fault(target) == "were altered"


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00", '{"labels.npy": [1, 2, 3, 4]}'])
def test_a_damaged_stamp_leads_to_a_whole_check(
    target: Path, hashed: list[str], content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _settle(monkeypatch)
    (target / STAMP).write_text(content)
    (target / "labels.npy").write_bytes(b"0111")
    assert fault(target) == "were altered"


def test_a_stamp_does_not_vouch_for_another_seal(
    target: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _settle(monkeypatch)
    assert fault(target) is None
    sealed = json.loads((target / SEAL).read_text())
    sealed["files"]["labels.npy"] = "0" * 64
    (target / SEAL).write_text(json.dumps(sealed))
    assert fault(target) == "were altered"
