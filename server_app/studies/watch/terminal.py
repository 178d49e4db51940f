"""Show a run live in a terminal."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedsilo.server_app.studies.watch.view import SITE_COLUMNS, Look, View

_EVERY = 1.0  # seconds between looks


def follow(look: Look, console: Console, every: float = _EVERY) -> None:
    """Show what ``look`` returns until the run is over, or for a deployment until an interrupt.

    Raises:
        FedsiloError: the run has disappeared.
    """
    view = look()
    with Live(rendered(view), console=console, auto_refresh=False, transient=False) as live:
        while view.members or not (view.run and view.run.over):
            time.sleep(every)
            view = look()
            live.update(rendered(view), refresh=True)
    if not console.is_terminal:
        console.print()  # rich leaves out the end of the last line there


def rendered(view: View) -> Group:
    """Return a view for the terminal: a line, and a table of the sites."""
    parts: list[Text | Table] = [Text(view.line())]
    if rows := view.site_rows():
        table = Table(*SITE_COLUMNS)
        for row in rows:
            table.add_row(*map(Text, row))  # Text: a site's own words are not markup
        parts.append(table)
    return Group(*parts)
