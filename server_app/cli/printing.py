"""Lines on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def line_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line as it is: neither wrapped nor coloured, no markup."""
    return lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False)


def progress_printer(console: Console) -> Callable[[str], None]:
    """Return a function that prints a line of what goes on, wrapped to the terminal."""
    return lambda line: console.print(line, highlight=False)
