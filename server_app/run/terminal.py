"""Prints tables on a terminal, and progress bars for a run's rounds and its current phase.

The bars follow ``progress.json``, so that a run is drawn the same way in this process and behind
``flwr run``, whose output is a stream of lines.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event, Thread

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import TextType

from fedsilo.core.errors import FedsiloError
from fedsilo.core.one_line import terminal_text
from fedsilo.server_app.records.progress import Progress

_EVERY = 0.5  # seconds between two readings of the progress
# A number with its sign, unit, brackets or star; a path or a name with digits does not match
_NUMBERS = re.compile(r"(?<!\S)[^\sA-Za-z_/]*\d[^\sA-Za-z_/]*(?:e[+-]?\d+)?[A-Za-z%]{0,2}(?!\S)")
_LEAST_TEXT = 4  # characters; the narrowest column of longer texts


class SafeConsole(Console):
    """A console that replaces control characters, so that no text can command the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield a renderable's segments, with control characters in its texts replaced."""
        # Rich's own control segments stay: they move the cursor and set colours
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                yield Segment(terminal_text(segment.text), segment.style)


def make_console() -> Console:
    """Create a console on standard output that shows texts as they are, without Rich's markup.

    If the output is not a terminal, the console is 120 characters wide.
    """
    console = SafeConsole(markup=False)
    if console.is_terminal:
        return console
    return SafeConsole(width=120, markup=False)


def printer(console: Console) -> Callable[..., None]:
    """Return a function that prints a line as it is, in an optional ``style`` of Rich."""
    return partial(console.print, highlight=False, soft_wrap=True, markup=False)


def print_table(console: Console, table: Table) -> None:
    """Print a table. On a terminal, ``fit_table`` fits the table to the width first.

    If the output is not a terminal, no cell is wrapped and the table may be wider than usual,
    because a program may read the rows.
    """
    if console.is_terminal:
        console.print(*fit_table(table, console.width), sep="\n")
        return
    usual = console.width
    widths = [_widest_part(column, str.splitlines) for column in table.columns]
    console.width = max(usual, _total_width(widths))
    console.print(table, soft_wrap=True)
    console.width = usual


def fit_table(table: Table, width: int) -> list[Table]:
    """Fit a table into ``width`` characters without breaking any number.

    Texts are wrapped, and long words are broken.

    Returns:
        One table. If the columns do not fit side by side, several tables, each with the first
        column and some of the other columns. Only the first table has the title.
    """
    natural = [_widest_part(column, str.splitlines) for column in table.columns]
    if _total_width(natural) <= width:
        return [table]
    least = []
    for column, longest in zip(table.columns, natural, strict=True):
        numbers = _widest_part(column, _NUMBERS.findall)
        least.append(max(numbers, min(longest, _LEAST_TEXT)))
    groups: list[list[int]] = [[0]]
    for number in range(1, len(natural)):
        # A second column is taken in any case, because the first one alone is of little use
        beside = [least[one] for one in (*groups[-1], number)]
        if len(groups[-1]) > 1 and _total_width(beside) > width:
            groups.append([0])
        groups[-1].append(number)
    tables: list[Table] = []
    for group in groups:
        widths = _narrow_columns(
            [natural[one] for one in group], [least[one] for one in group], width
        )
        title = None if tables else table.title
        tables.append(_take_columns(table, dict(zip(group, widths, strict=True)), title))
    return tables


def _narrow_columns(widths: list[int], least: list[int], width: int) -> list[int]:
    """Narrow ``widths`` in place, the widest column first, until the table fits, and return them.

    No column becomes narrower than its entry in ``least``, even if the table then does not fit.
    """
    while _total_width(widths) > width:
        spare = [now - small for now, small in zip(widths, least, strict=True)]
        if not any(spare):
            break
        # Columns that can be narrowed come first, and among them the widest
        wide = max(range(len(widths)), key=lambda one: (spare[one] > 0, widths[one]))
        widths[wide] -= 1
    return widths


def _take_columns(table: Table, widths: Mapping[int, int], title: TextType | None) -> Table:
    """Build a table of some columns of ``table``: column number -> width in characters."""
    part = Table(title=title, title_justify=table.title_justify)
    cells = []
    for number, width in widths.items():
        column = table.columns[number]
        part.add_column(column.header, justify=column.justify, width=width, overflow="fold")
        cells.append(list(column.cells))
    for row, texts in zip(table.rows, zip(*cells, strict=True), strict=True):
        part.add_row(*texts, style=row.style, end_section=row.end_section)
    return part


def _widest_part(column: Column, split: Callable[[str], list[str]]) -> int:
    """Return the width in characters of a column's widest part, at least 1.

    ``split`` cuts the header and each cell into parts, such as lines or numbers. The widest of all
    these parts counts.
    """
    widest = 1
    for text in (column.header, *column.cells):
        for part in split(str(text)):
            widest = max(widest, cell_len(part))
    return widest


def _total_width(widths: Sequence[int]) -> int:
    """Return the width of a table: each column has a blank at both sides and a line after it."""
    return 1 + sum(width + 3 for width in widths)


@contextmanager
def progress_bars(console: Console, read: Callable[[], Progress | None]) -> Iterator[None]:
    """Draw progress bars for rounds and sites while the block runs, if the output is a terminal.

    A thread redraws the bars every half second.

    Args:
        console: the console. The bars are drawn below its lines.
        read: returns the progress of the run, or None before it has begun.
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
