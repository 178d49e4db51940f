"""Prints lines and tables on standard output."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from fedsilo.api.options import Option
from fedsilo.core.one_line import terminal_text

AsJson = Annotated[bool, Option("print JSON", name="--json")]


def line(text: object) -> None:
    """Print a line and flush it, so that a pipe or a log shows it while the command runs.

    Control characters are replaced first, because the line may quote somebody else's run.
    """
    print(terminal_text(str(text)), flush=True)


def print_result(result: Any) -> None:
    """Print a string, a path, a Rich table, an object with ``lines()``, or an iterable of these.

    The elements of an iterable are printed in order, each by these rules. For any other object,
    nothing is printed.
    """
    if hasattr(result, "lines"):
        result = result.lines()
    if isinstance(result, str | Path):
        line(result)
    elif isinstance(result, Iterable):
        for one in result:
            print_result(one)
    elif hasattr(result, "__rich_console__"):
        from fedsilo.server_app.run.terminal import make_console, print_table

        print_table(make_console(), result)


def print_json(content: Any) -> None:
    """Print a value as one JSON document.

    A number that is not finite becomes null, because JSON has no such numbers.
    """
    line(json.dumps(_finite(content), indent=2, default=str))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_finite, value))
    return value


def print_columns(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table.

    ``columns`` has the titles of the columns. Each of ``rows`` has its cells in the order of the
    columns.
    """
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    print_result(table)
