from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from datasets.io.atomic_files import build_folder, write_atomically


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@budget(max_examples=25, deadline=None)
@given(content=st.one_of(st.binary(max_size=50), st.text(max_size=50)))
def test_content_is_read_back_as_written_over_whatever_was_there(
    folder: Path, content: bytes | str
) -> None:
    target = folder / "deep" / "er" / "file"
    write_atomically(target, content)
    assert target.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert [path.name for path in target.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_file_has_the_mode_that_was_asked_for(tmp_path: Path, mode: int) -> None:
    write_atomically(tmp_path / "file", b"content", mode)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
    write_atomically(tmp_path / "file", b"new")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken" / "inside").mkdir(parents=True)  # no file can replace a folder
    with pytest.raises(OSError, match="taken"):
        write_atomically(tmp_path / "taken", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_folder_whose_filling_fails_never_appears(tmp_path: Path) -> None:
    def fill(work: Path) -> None:
        (work / "half").write_text("1")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build_folder(tmp_path / "target", fill)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_a_rival_finished_first_is_kept_as_the_rival_made_it(tmp_path: Path) -> None:
    def fill(work: Path) -> None:
        (work / "one").write_text("mine")
        if not (tmp_path / "target").exists():
            build_folder(
                tmp_path / "target", lambda rival: write_atomically(rival / "one", "first")
            )

    build_folder(tmp_path / "target", fill)
    assert (tmp_path / "target" / "one").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
