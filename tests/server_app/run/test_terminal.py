"""Tables keep their numbers whole at any width; progress bars are drawn only on a terminal."""

import io
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from fedsilo.cli.main import main
from fedsilo.server_app.records.progress import Progress
from fedsilo.server_app.records.summary import result_table
from fedsilo.server_app.run import terminal as bars_module
from fedsilo.server_app.run.terminal import print_table, progress_bars
from tests.server_app.records.test_progress import made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars_module, "_EVERY", 0.01)


def test_bars_draw_rounds_and_sites_of_what_is_read_on_a_terminal() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    looks: list[Progress | None] = [None, made(finished_rounds=1)]

    def read() -> Progress | None:
        return looks.pop(0) if len(looks) > 1 else looks[0]

    with progress_bars(console, read):
        limit = time.monotonic() + 20
        while "round 2, train" not in stream.getvalue() and time.monotonic() < limit:
            time.sleep(0.05)
    rounds, sites = (
        next(line for line in reversed(stream.getvalue().splitlines()) if name in line)
        for name in ("rounds", "sites")
    )
    assert "1/3" in rounds
    assert "1/2" in sites
    assert "round 2, train" in sites


def test_bars_are_absent_and_nothing_is_read_where_there_is_no_terminal() -> None:
    stream = io.StringIO()

    def read() -> Progress:
        raise AssertionError

    with progress_bars(Console(file=stream, force_terminal=False), read):
        time.sleep(0.05)
    assert stream.getvalue() == ""


def test_bars_of_a_run_that_fails_end_with_it() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(ValueError, match="the run"), progress_bars(console, made):
        raise ValueError("the run")
    with progress_bars(console, made):  # rich refuses a second display while one is drawn
        pass


def test_a_table_on_a_narrow_terminal_leaves_no_letter_out() -> None:
    table = Table("experiment", "samples")
    table.add_row("picsr-heart", "14,208")
    drawn = io.StringIO()
    print_table(Console(file=drawn, force_terminal=True, width=20), table)
    cells = [line.split("│") for line in drawn.getvalue().splitlines() if "│" in line]
    assert "".join(cell[1].strip() for cell in cells) == "picsr-heart"
    assert "".join(cell[2].strip() for cell in cells) == "14,208"


def _drawn(table: Table, width: int, is_terminal: bool = True) -> list[str]:
    """Return the printed lines without the colours."""
    drawn = io.StringIO()
    print_table(Console(file=drawn, force_terminal=is_terminal, width=width), table)
    return re.sub(r"\x1b\[[0-9;]*m", "", drawn.getvalue()).splitlines()


def _numbers_of(lines: Sequence[str]) -> set[str]:
    """Return the cells of printed lines that are numbers."""
    return set(re.findall(r"(?<=[│┃] )\s*([\d.]+)(?=\s*[│┃])", "\n".join(lines)))


VALUES = {
    "cleveland": {"accuracy": 0.740, "balanced-accuracy": 0.7404, "auc": 0.858, "ece": 0.145},
    "switzerland": {"accuracy": 0.938, "balanced-accuracy": 0.5, "auc": 0.863, "ece": 0.214},
}


@pytest.mark.parametrize("width", [20, 30, 40, 50, 60, 80])
def test_a_result_table_breaks_no_number_at_any_width(width: int) -> None:
    shown = ("accuracy", "balanced-accuracy", "auc", "ece")
    table = result_table(VALUES, dict.fromkeys(VALUES, ""), "Results", shown)
    lines = _drawn(table, width)
    whole = _numbers_of(_drawn(table, 200))
    assert {"0.858", "0.863", "0.938"} <= whole
    assert _numbers_of(lines) == whole
    assert max(map(len, lines)) <= width


@given(
    st.lists(
        st.lists(st.floats(-1e4, 1e4).map("{:.3f}".format), min_size=6, max_size=6), min_size=1
    ),
    st.integers(24, 90),
)
def test_every_number_of_a_table_is_on_one_line(rows: list[list[str]], width: int) -> None:
    table = Table("name of the site", *(f"metric number {number}" for number in range(6)))
    for row in rows:
        table.add_row("hospital-of-the-north", *row)
    lines = _drawn(table, width)
    for row in rows:
        for cell in row:
            assert any(cell in line for line in lines)
    assert max(map(len, lines)) <= width


def test_a_table_in_a_pipe_has_one_line_for_each_row() -> None:
    table = Table("site", *(f"balanced accuracy of model {number}" for number in range(9)))
    cells = [f"0.{number}23 ± 0.004" for number in range(9)]
    table.add_row("north", *cells)
    (line,) = [line for line in _drawn(table, 120, is_terminal=False) if "north" in line]
    assert [cell.strip() for cell in line.split("│")[2:-1]] == cells


def test_the_table_of_a_run_is_whole_in_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The case of the split pane: at 40 columns, an AUC of 0.858 was read as 0.85."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    words = ["simulate", "fedavg", "--engine", "inline", "--no-pictures", "--out", str(tmp_path)]
    words += ["--set", "dataset=heart-synthetic", "--set", "rounds=2", "--name", "r"]
    assert main([*words, "--set", "machine.device=cpu"]) == 0
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    table = [line for line in printed.splitlines() if line.startswith("│")]
    assert table
    for line in table:
        for cell in line.strip("│").split("│")[1:]:
            assert re.fullmatch(r"\s*(\d\.\d{3}|n/a)?\s*", cell), line
