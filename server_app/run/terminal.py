"""Prints tables on a terminal, and progress bars for a run's rounds and its current phase.

The bars are drawn from ``progress.json``. So a run looks the same whether it runs in this process
or behind ``flwr run``, whose output is only a stream of lines.
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
    """A console that replaces control characters, so that no text can control the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the segments of a renderable, with control characters in its text replaced.

        The replacement of each is U+FFFD. Line ends, tabs and Rich's own control segments pass
        unchanged.
        """
        # Rich's own control segments stay: they move the cursor and set colours
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                yield Segment(terminal_text(segment.text), segment.style)


def make_console() -> Console:
    """Create a console on standard output that prints text literally, without Rich's markup.

    If the output is not a terminal, the console is 120 characters wide.
    """
    console = SafeConsole(markup=False)
    if console.is_terminal:
        return console
    return SafeConsole(width=120, markup=False)


def printer(console: Console) -> Callable[..., None]:
    """Return a function that prints one line literally, optionally in a Rich ``style``."""
    return partial(console.print, highlight=False, soft_wrap=True, markup=False)


def print_table(console: Console, table: Table) -> None:
    """Print a table on the console.

    On a terminal, text is wrapped to the terminal's width. If the columns do not fit side by side,
    they are split into several tables, which repeat the first column. If the output is not a
    terminal, no cell is wrapped, because a program may read the rows. The table may then be wider
    than the console.
    """
    if console.is_terminal:
        console.print(*fit_table(table, console.width), sep="\n")
        return
    usual = console.width
    widths = [_measure_widest_part(column, str.splitlines) for column in table.columns]
    console.width = max(usual, _measure_table(widths))
    console.print(table, soft_wrap=True)
    console.width = usual


def fit_table(table: Table, width: int) -> list[Table]:
    """Fit a table into ``width`` characters without breaking any number in a cell.

    Text is wrapped, and long words are broken. A table that fits already is returned unchanged, as
    the only entry of the list.

    Returns:
        One table, or several if the columns do not fit side by side. Each table then has the first
        column and at least one other column, even if they are wider than ``width``. Only the first
        table has the title.
    """
    natural = [_measure_widest_part(column, str.splitlines) for column in table.columns]
    if _measure_table(natural) <= width:
        return [table]
    least = []
    for column, longest in zip(table.columns, natural, strict=True):
        numbers = _measure_widest_part(column, _NUMBERS.findall)
        least.append(max(numbers, min(longest, _LEAST_TEXT)))
    groups: list[list[int]] = [[0]]
    for number in range(1, len(natural)):
        # A second column is always taken, because the first column by itself is of little use
        beside = [least[one] for one in (*groups[-1], number)]
        if len(groups[-1]) > 1 and _measure_table(beside) > width:
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
    """Narrow ``widths`` in place until the table fits into ``width``, and return ``widths``.

    Spaces and borders count towards the table's width. Each step takes one character from the
    widest column that can still be narrowed. No column becomes narrower than its entry in
    ``least``, so the table may stay too wide.
    """
    while _measure_table(widths) > width:
        spare = [now - small for now, small in zip(widths, least, strict=True)]
        if not any(spare):
            break
        # Columns that can be narrowed come first, and among them the widest
        wide = max(range(len(widths)), key=lambda one: (spare[one] > 0, widths[one]))
        widths[wide] -= 1
    return widths


def _take_columns(table: Table, widths: Mapping[int, int], title: TextType | None) -> Table:
    """Build a new table from some columns of ``table``, each with a fixed width.

    Text that is too long for a column is wrapped. Styles and sections of the rows are kept.

    Args:
        table: the table to copy from, which is not changed.
        widths: the number of each chosen column, from 0 -> its new width in characters.
        title: the title of the new table.
    """
    part = Table(title=title, title_justify=table.title_justify)
    cells = []
    for number, width in widths.items():
        column = table.columns[number]
        part.add_column(column.header, justify=column.justify, width=width, overflow="fold")
        cells.append(list(column.cells))
    for row, texts in zip(table.rows, zip(*cells, strict=True), strict=True):
        part.add_row(*texts, style=row.style, end_section=row.end_section)
    return part


def _measure_widest_part(column: Column, split: Callable[[str], list[str]]) -> int:
    """Return the width of the widest part of a column's header and cells. It is at least 1.

    The width is in characters of a terminal, where a wide character, such as a Chinese one, counts
    as 2.

    Args:
        column: the column of a table.
        split: returns the parts of a text to measure, such as its lines or its numbers.
    """
    widest = 1
    for text in (column.header, *column.cells):
        for part in split(str(text)):
            widest = max(widest, cell_len(part))
    return widest


def _measure_table(widths: Sequence[int]) -> int:
    """Return the width of a table from the widths of its columns.

    Each column has a space on both sides and a border after it, and one border is at the left.
    """
    return 1 + sum(width + 3 for width in widths)


@contextmanager
def progress_bars(console: Console, read: Callable[[], Progress | None]) -> Iterator[None]:
    """Draw progress bars for rounds and sites while the ``with`` block runs.

    A thread reads the progress and redraws the bars every half second. It ignores a FedsiloError
    from ``read``, while any other error ends the drawing. The bars disappear at the end. Nothing is
    drawn if the output is not a terminal. The bar for sites starts at 0 in each phase of a round.

    Args:
        console: the console. The bars are drawn below the lines that it prints.
        read: returns the run's progress, or None before the run has begun. None leaves the bars as
            they are.
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
            # A file of another version is ignored, because the run itself will report it
            with suppress(FedsiloError):
                here = read()
                if here is None:
                    continue
                bars.update(rounds, total=here.rounds, completed=here.finished_rounds)
                now = ""
                if here.phase:
                    now = f"round {here.round}, {here.phase}"
                # The time left is estimated from a phase's own replies, so it starts anew
                if now != phase:
                    bars.reset(sites, note=now)
                phase = now
                bars.update(sites, total=len(here.asked), completed=len(here.answered))

    # A separate thread, because the run blocks this one while it waits for replies
    thread = Thread(target=draw, name="progress-bars", daemon=True)
    with bars:
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
