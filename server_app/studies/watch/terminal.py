"""A run live in a terminal."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedsilo.server_app.studies.watch.view import SITE_COLUMNS, Look, View

_EVERY = 1.0  # seconds from one look to the next


def follow(look: Look, console: Console, every: float = _EVERY) -> None:
    """Show what ``look`` sees until the run is over; of a deployment until somebody interrupts.

    Raises:
        FedsiloError: there is nothing to see any more.
    """
    view = look()
    with Live(drawn(view), console=console, auto_refresh=False, transient=False) as live:
        while view.members or not (view.run and view.run.over):
            time.sleep(every)
            view = look()
            live.update(drawn(view), refresh=True)
    if not console.is_terminal:
        console.print()  # there the last view is printed without the end of its last line


def drawn(view: View) -> Group:
    """Return a view as it stands in a terminal: a line, and a table of the sites."""
    parts: list[Text | Table] = [Text(view.line())]
    if rows := view.site_rows():
        table = Table(*SITE_COLUMNS)
        for row in rows:
            table.add_row(*map(Text, row))  # Text: what a site says is no markup
        parts.append(table)
    return Group(*parts)
