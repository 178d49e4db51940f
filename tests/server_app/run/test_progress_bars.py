"""Progress bars: on a terminal, as markers in a stream, or absent."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedsilo.server_app.run.progress_bars import PROGRESS_VARIABLE, TerminalBars, bars_for, follow


def test_markers_move_the_bars_at_the_far_end_and_other_lines_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PROGRESS_VARIABLE, "1")
    stream = io.StringIO()
    near = bars_for(Console(file=stream))
    near("begin", 3, 1)
    near("phase", 2, "train", 9)
    near("reply", 2, "train", "s1a")
    near("round", 2)
    far = TerminalBars(Console(file=io.StringIO(), force_terminal=True))
    assert all(follow(line, far.show) for line in stream.getvalue().splitlines())
    rounds, sites = far.progress.tasks
    assert (rounds.total, rounds.completed) == (3, 2)
    assert (sites.total, sites.completed) == (9, 1)
    assert sites.fields["note"] == "round 2, train, s1a"
    near("stop")
    assert follow(stream.getvalue().splitlines()[-1], far.show)
    assert not follow("round 1/3  train loss 1.0", far.show)


def test_bars_are_drawn_on_a_terminal_marked_when_asked_and_absent_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    plain = Console(file=stream, force_terminal=False)
    monkeypatch.delenv(PROGRESS_VARIABLE, raising=False)
    bars_for(plain)("begin", 3, 1)
    assert stream.getvalue() == ""
    terminal = bars_for(Console(file=io.StringIO(), force_terminal=True))
    assert getattr(terminal, "__func__", None) is TerminalBars.show
    monkeypatch.setenv(PROGRESS_VARIABLE, "1")
    bars_for(plain)("begin", 3, 1)
    assert stream.getvalue() != ""
