"""A file that grows: what a writing adds, what it replaces, and what a resumed run takes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.models.contract.errors import CheckpointError, RunDirectoryError
from fedsilo.server_app.records.growing_csv import GrowingCsv

HEADER = ("round", "site")
Rows = list[list[str]]
cells = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=5)
rows = st.lists(st.lists(cells, min_size=2, max_size=2), max_size=4)


def _file(folder: Path) -> GrowingCsv:
    return GrowingCsv(folder / "x.csv", HEADER)


def test_settled_rows_stay_and_open_ones_are_replaced(tmp_path: Path) -> None:
    file = _file(tmp_path)
    file.write([(0, "a")], [(1, "long open row"), (1, "b")])
    assert file.path.read_text() == "round,site\n0,a\n1,long open row\n1,b\n"
    file.write([(1, "b")], [(2, "c")])
    assert file.path.read_text() == "round,site\n0,a\n1,b\n2,c\n"
    assert list(file.rows()) == [["0", "a"], ["1", "b"]]


@given(parts=st.lists(st.tuples(rows, rows), min_size=1, max_size=4), died=st.integers(0, 3))
def test_a_resumed_file_ends_as_one_written_in_one_go(
    parts: list[tuple[Rows, Rows]], died: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, other = tmp_path_factory.mktemp("grown"), tmp_path_factory.mktemp("whole")
    file, checkpoint = _file(folder), _file(folder).final
    for number, (settled, still_open) in enumerate(parts):
        file.write(settled, still_open)
        if number == died:  # written, but the checkpoint that knows of it is not
            file = _file(folder)
            file.restore(checkpoint)
            file.write(settled, still_open)
        checkpoint = file.final
    whole = _file(other)
    whole.write([row for settled, _ in parts for row in settled], parts[-1][1])
    assert file.path.read_bytes() == whole.path.read_bytes()
    assert list(file.rows()) == [row for settled, _ in parts for row in settled]


@pytest.mark.parametrize("harm", ["round,site\n0,b\n", "round,site\n", None])
def test_a_file_that_was_altered_is_not_gone_on_with(harm: str | None, tmp_path: Path) -> None:
    file = _file(tmp_path)
    file.write([(0, "a")])
    file.path.unlink()
    if harm is not None:
        file.path.write_text(harm)
    with pytest.raises(CheckpointError, match="it was altered") as told:
        _file(tmp_path).restore(file.final)
    assert "\n" not in str(told.value)


def test_a_file_that_goes_while_the_run_is_on_is_told_in_a_line(tmp_path: Path) -> None:
    file = _file(tmp_path)
    file.write([(0, "a")])
    file.path.write_text("round")
    with pytest.raises(RunDirectoryError, match="it is shorter than it was"):
        file.write([(1, "b")])
    file.path.unlink()
    with pytest.raises(RunDirectoryError, match="No such file"):
        file.write([(1, "b")])
