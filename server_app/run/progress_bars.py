"""Progress bars per round and site, drawn here or, from inside a Flower run, at its far end.

``flwr run`` shows a run's output as a stream of lines, so a bar cannot be drawn in it. There the
app prints marker lines, if it is asked to by FEDSILO_PROGRESS, and the command line that reads
the stream draws the bars.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PROGRESS_VARIABLE = "FEDSILO_PROGRESS"
_MARKER = "@fedsilo-progress "


def make_console() -> Console:
    """Return a console on standard output, wide enough for a table where no terminal is."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


class Bars:
    """Draws nothing."""

    def begin(self, total_rounds: int, done: int) -> None:
        """Begin with ``done`` of ``total_rounds`` finished."""

    def phase(self, round_: int, phase: str, sites: int) -> None:
        """Begin a phase that asks so many sites."""

    def reply(self, round_: int, phase: str, site: str) -> None:
        """Move on: ``site`` has answered."""

    def round_done(self, round_: int) -> None:
        """Move on: the round is finished."""

    def stop(self) -> None:
        """Take the bars away."""

    def close(self) -> None:
        """Take the bars away, whatever happened."""
        self.stop()


class TerminalBars(Bars):
    """Two bars below the lines of a terminal: rounds, and the sites of the current phase."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description:>6}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
        )
        self.rounds = self.progress.add_task("rounds", total=None, note="")
        self.sites = self.progress.add_task("sites", total=None, note="")

    def begin(self, total_rounds: int, done: int) -> None:
        """Show the bars."""
        self.progress.update(self.rounds, total=total_rounds, completed=done)
        self.progress.start()

    def phase(self, round_: int, phase: str, sites: int) -> None:
        """Empty the bar of the sites."""
        self.progress.reset(self.sites, total=sites, note=f"round {round_}, {phase}")

    def reply(self, round_: int, phase: str, site: str) -> None:
        """Move the bar of the sites."""
        self.progress.update(self.sites, advance=1, note=f"round {round_}, {phase}, {site}")

    def round_done(self, round_: int) -> None:
        """Move the bar of the rounds."""
        self.progress.update(self.rounds, completed=round_)

    def stop(self) -> None:
        """Take the bars away."""
        self.progress.stop()


class MarkerBars(Bars):
    """Prints each call as one line, for ``follow`` at the far end of the stream."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def _mark(self, *call: Any) -> None:
        self.console.file.write(f"{_MARKER}{json.dumps(call)}\n")
        self.console.file.flush()

    def begin(self, total_rounds: int, done: int) -> None:
        """Mark it."""
        self._mark("begin", total_rounds, done)

    def phase(self, round_: int, phase: str, sites: int) -> None:
        """Mark it."""
        self._mark("phase", round_, phase, sites)

    def reply(self, round_: int, phase: str, site: str) -> None:
        """Mark it."""
        self._mark("reply", round_, phase, site)

    def round_done(self, round_: int) -> None:
        """Mark it."""
        self._mark("round_done", round_)

    def stop(self) -> None:
        """Mark it."""
        self._mark("stop")


def choose_bars(console: Console) -> Bars:
    """Return bars for where the output goes: a terminal, a marked stream, or neither."""
    if console.is_terminal:
        return TerminalBars(console)
    return MarkerBars(console) if os.environ.get(PROGRESS_VARIABLE) else Bars()


def follow(line: str, bars: Bars) -> bool:
    """Move ``bars`` if ``line`` is a marker; tell whether it was one."""
    _, marker, call = line.partition(_MARKER)
    if not marker:
        return False
    name, *arguments = json.loads(call)
    moves: dict[str, Callable[..., None]] = {
        "begin": bars.begin,
        "phase": bars.phase,
        "reply": bars.reply,
        "round_done": bars.round_done,
        "stop": bars.stop,
    }
    moves[name](*arguments)
    return True
