"""Shows the state of what is watched in a terminal."""

import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedsilo.reports.watch.view import RUN_COLUMNS, SITE_COLUMNS, Look, View
from fedsilo.server_app.run.terminal import fit_table

_EVERY = 1.0  # seconds between two states on the terminal


def follow(look: Look, console: Console, every: float = _EVERY) -> None:
    """Show the state of a run in a terminal, and update it until the run is over.

    A deployment, a hospital's node or a folder of runs can be shown too. They have no end, so their
    state is shown until the user presses Ctrl-C.

    Args:
        look: reads the present state of the run, the deployment, the node or the folder.
        console: the terminal.
        every: seconds between two readings.

    Raises:
        FedsiloError: the run, the deployment, the folder or the hospital's ledger cannot be read.
        OSError: a file of a hospital's node cannot be read.
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    view = look()
    shown = render_view(view, console.width)
    with Live(shown, console=console, auto_refresh=False, transient=False) as live:
        # A deployment or a folder may get another run, so it is watched until an interrupt
        while not (view.run and view.run.over) or view.members:
            time.sleep(every)
            view = look()
            live.update(render_view(view, console.width), refresh=True)
    if not console.is_terminal:
        console.print()  # rich leaves out the end of the last line there


def render_view(view: View, width: int) -> Group:
    """Build the summary line and the table that a terminal of ``width`` characters shows.

    If ``view`` is of a folder, the table has a row for each run. Otherwise, it has a row for each
    site of the viewed run. A table without rows is left out.
    """
    parts: list[Text | Table] = [Text(view.line())]
    columns, rows = SITE_COLUMNS, view.site_rows()
    if view.runs is not None:
        columns, rows = RUN_COLUMNS, list(view.runs)
    if rows:
        table = Table(*columns)
        for row in rows:
            table.add_row(*map(Text, row))  # Text: a site's own words are not markup
        parts += fit_table(table, width)
    return Group(*parts)
