"""Prints tables on a terminal, and progress bars for a run's rounds and its current phase.

The bars follow ``progress.json``, so that a run is drawn the same way in this process and behind
``flwr run``, whose output is a stream of lines.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event, Thread
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.segment import Segment
from rich.table import Table

from fedsilo.core.errors import FedsiloError
from fedsilo.core.files.atomic_files import STANDARD_OUTPUT, naming
from fedsilo.core.one_line import terminal_text
from fedsilo.server_app.records.progress import Progress

_EVERY = 0.5  # seconds between two readings of the progress


class SafeConsole(Console):
    """A console that replaces control characters, so that no text can command the terminal."""

    def print(self, *texts: Any, **options: Any) -> None:
        """Print as Rich does; an OSError of a full disk names standard output."""
        with naming(STANDARD_OUTPUT):
            super().print(*texts, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the segments of a renderable, with control characters of its texts replaced."""
        # Rich's own control segments stay: they move the cursor and set colours
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                yield Segment(terminal_text(segment.text), segment.style)


def make_console() -> Console:
    """Return a console on standard output; without a terminal it is 120 characters wide.

    It shows texts as they are; none is read as Rich's markup.
    """
    console = SafeConsole(markup=False)
    if console.is_terminal:
        return console
    return SafeConsole(width=120, markup=False)


def printer(console: Console) -> Callable[..., None]:
    """Return a function that prints a line as it is; it takes a ``style`` of Rich."""
    return partial(console.print, highlight=False, soft_wrap=True, markup=False)


def print_table(console: Console, table: Table) -> None:
    """Print a table in full: on a terminal, long cells are wrapped to the terminal's width."""
    for column in table.columns:
        column.overflow = "fold"
    console.print(table, soft_wrap=not console.is_terminal)


@contextmanager
def progress_bars(console: Console, read: Callable[[], Progress | None]) -> Iterator[None]:
    """Draw two bars below the lines of a terminal while the block runs; elsewhere draw nothing.

    ``read`` returns the progress of the run, or None before it has begun.
    """
    if not console.is_terminal:
        yield
        return
    columns = ("{task.description:>6}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bars = Bars(*columns, TextColumn("{task.fields[note]}"), console=console, transient=True)
    rounds = bars.add_task("rounds", total=None, note="")
    sites = bars.add_task("sites", total=None, note="")
    ended, phase = Event(), ""

    def draw() -> None:
        nonlocal phase
        while not ended.wait(_EVERY):
            with suppress(FedsiloError):  # a file of another version: the run itself will say so
                here = read()
                if here is None:
                    continue
                bars.update(rounds, total=here.rounds, completed=here.finished_rounds)
                now = ""
                if here.phase:
                    now = f"round {here.round}, {here.phase}"
                if now != phase:  # the time left is estimated from a phase's own replies
                    bars.reset(sites, note=now)
                phase = now
                bars.update(sites, total=len(here.asked), completed=len(here.answered))

    # A thread of its own, because the run blocks this one while it waits for replies
    thread = Thread(target=draw, name="progress-bars", daemon=True)
    with bars:
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
