"""The file of rows: complete after each one, and what a cut or damaged file means."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.ranking.rows import Row, Rows
from fedsilo.core.errors import SettingError

RAN = Row(
    *("heart", "fedprox", 0, 0.003, "fedprox.proximal-mu=0.1", "accuracy"),
    validation=2 / 3,
    loss=0.5,
    test=1 / 3,
    accuracy=1 / 3,
    up=10,
    down=20,
    seconds=1.5,
    samples=480,
    processor="one (AVX2)",
    run="abc",
)
NOT_RUN = Row("heart", "fedbn", note="no batch norm, in this 'network'")


def _written(path: Path) -> Path:
    rows = Rows(path)
    for row in (RAN, NOT_RUN):
        rows.add(row)
    return path


def test_rows_are_read_as_they_were_added(tmp_path: Path) -> None:
    path = _written(tmp_path / "rows.csv")
    assert Rows.read(path).rows == [RAN, NOT_RUN]
    assert Rows.read(tmp_path / "none.csv").rows == []


def test_a_row_that_is_cut_short_is_none(tmp_path: Path) -> None:
    path = _written(tmp_path / "rows.csv")
    text = path.read_bytes()
    header = text.index(b"\n") + 1
    whole = text.index(b"\n", header) + 1
    for size in range(header, len(text)):
        path.write_bytes(text[:size])
        assert Rows.read(path).rows == ([RAN] if size >= whole else []), size


@pytest.mark.parametrize(("before", "after"), [(",10,", ",,"), ("0.003", "x"), (",abc,", ",abc,,")])
def test_a_damaged_line_is_named(before: str, after: str, tmp_path: Path) -> None:
    path = _written(tmp_path / "rows.csv")
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(SettingError, match="line 2 is damaged: delete it"):
        Rows.read(path)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n"])
def test_another_table_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(
        SettingError, match=r"not a table of 'benchmarks\.ranking': name another --csv"
    ):
        Rows.read(tmp_path / "rows.csv")


def test_a_run_is_found_again_unless_it_was_of_other_settings(tmp_path: Path) -> None:
    rows = Rows.read(_written(tmp_path / "rows.csv"))
    asked = Row(*("heart", "fedprox", 0, 0.003, "fedprox.proximal-mu=0.1", "accuracy"), run="abc")
    assert rows.found(asked) == RAN
    assert rows.found(replace(asked, seed=1)) is None
    with pytest.raises(SettingError, match="with other settings or data"):
        rows.found(replace(asked, run="abd"))


def test_a_run_takes_the_place_of_why_there_was_none(tmp_path: Path) -> None:
    rows = Rows.read(_written(tmp_path / "rows.csv"))
    rows.add(replace(RAN, method="fedbn"))
    assert [row.note for row in Rows.read(rows.path).rows] == ["", ""]


def test_the_same_reason_again_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    rows = Rows.read(_written(tmp_path / "rows.csv"))
    before = rows.path.stat()
    rows.add(NOT_RUN)
    assert rows.path.stat() == before
