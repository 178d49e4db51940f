import errno
import fcntl
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from fedsilo.core.files.atomic_files import build_folder, scratch_folder, write_atomically


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


def test_a_folder_that_cannot_be_replaced_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    build_folder(target, lambda work: write_atomically(work / "one", "before"))
    rename = Path.rename

    def fail_for_new(path: Path, to: Path) -> Path:
        if path.name == "folder":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(OSError, match="target"):
        build_folder(target, lambda work: write_atomically(work / "one", "new"), replace=True)
    assert (target / "one").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


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


def test_a_renaming_that_fails_is_no_rivals_because_a_folder_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target").mkdir()

    def forbid(path: Path, to: Path) -> Path:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "rename", forbid)
    with pytest.raises(PermissionError):
        build_folder(tmp_path / "target", lambda work: write_atomically(work / "one", "new"))
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_what_a_killed_writer_left_is_taken_over(tmp_path: Path) -> None:
    left = tmp_path / ".file.part"
    left.write_bytes(b"a longer half than the whole")
    left.chmod(0o644)
    write_atomically(tmp_path / "file", b"whole", 0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"whole"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_a_link_in_place_of_the_unfinished_file_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / ".file.part").symlink_to(other)
    with pytest.raises(OSError, match=r"file\.part"):
        write_atomically(tmp_path / "file", b"new")
    assert other.read_text() == "mine"


@pytest.mark.parametrize("locks", [True, False])
def test_many_writers_of_one_file_leave_one_of_theirs(
    tmp_path: Path, locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not locks:
        _without_locks(monkeypatch)
    contents = [bytes([number]) * 50_000 for number in range(20)]
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(write_atomically, tmp_path / "file", one) for one in contents]:
            done.result()
            assert (tmp_path / "file").read_bytes() in contents
    assert (tmp_path / "file").read_bytes() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def _without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_killed_builders_folder_goes_and_a_living_ones_stays(tmp_path: Path) -> None:
    (tmp_path / ".target.part-killed" / "folder").mkdir(parents=True)
    (tmp_path / ".other.part-killed").mkdir()
    with scratch_folder(tmp_path, "target") as living:
        build_folder(tmp_path / "target", lambda work: write_atomically(work / "one", "1"))
        assert living.is_dir()
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"target", ".other.part-killed", living.name}
    assert not living.exists()


def test_without_locks_a_folder_may_be_anothers_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".target.part-other").mkdir()
    _without_locks(monkeypatch)
    build_folder(tmp_path / "target", lambda work: write_atomically(work / "one", "1"))
    assert {path.name for path in tmp_path.iterdir()} == {"target", ".target.part-other"}
