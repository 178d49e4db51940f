"""Progress bars per round and site, drawn here or, from inside a Flower run, at its far end.

``flwr run`` shows a run's output as a stream of lines, so a bar cannot be drawn in it. There the
app prints marker lines, if FEDSILO_PROGRESS asks for them, and the command line that reads the
stream draws the bars. The events are those of ``records.progress_hook.ProgressHook``.
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
Show = Callable[..., None]  # takes an event and its values


def make_console() -> Console:
    """Return a console on standard output, wide enough for a table where there is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


class TerminalBars:
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

    def show(self, event: str, *values: Any) -> None:
        """Move the bars after an event."""
        match event, *values:
            case "begin", total, done:
                self.progress.update(self.rounds, total=total, completed=done)
                self.progress.start()
            case "phase", round_, phase, sites:
                self.progress.reset(self.sites, total=sites, note=f"round {round_}, {phase}")
            case "reply", round_, phase, site:
                self.progress.update(self.sites, advance=1, note=f"round {round_}, {phase}, {site}")
            case "round", round_:
                self.progress.update(self.rounds, completed=round_)
            case ("stop",):
                self.progress.stop()


def bars_for(console: Console) -> Show:
    """Return what shows events: bars on a terminal, markers if they are asked for, or nothing."""

    def mark(*event: Any) -> None:
        console.file.write(f"{_MARKER}{json.dumps(event)}\n")
        console.file.flush()

    if console.is_terminal:
        return TerminalBars(console).show
    return mark if os.environ.get(PROGRESS_VARIABLE) else lambda *_: None


def follow(line: str, show: Show) -> bool:
    """Show the event of a marker line; return whether ``line`` was one."""
    _, marker, event = line.partition(_MARKER)
    if marker:
        show(*json.loads(event))
    return bool(marker)
