"""Lines on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def line_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line as it is: neither wrapped nor coloured, no markup."""
    return lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False)


def progress_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line of what goes on, wrapped to the terminal."""
    return lambda line: console.print(line, highlight=False)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Draw a bar on a terminal's standard error while a block runs.

    It yields what moves the bar: a function of how much is done, and of how much there is.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    off = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=off) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
