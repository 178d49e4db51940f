"""Progress bars: they follow the progress on a terminal, and are absent elsewhere."""

import io
import time

import pytest
from rich.console import Console
from rich.table import Table

from fedsilo.server_app.records.progress import Progress
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
