"""The state of a run, or of a deployment and its newest run."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedsilo.deployment.deployment import read_deployment
from fedsilo.reports.watch.watched import Watched, look_at, newest_run
from fedsilo.server_app.records.progress import bytes_text, clock


@dataclass(frozen=True)
class View:
    """The state at one moment."""

    title: str
    run: Watched | None  # None: a deployment has had no run yet
    # A deployment's server and sites, each with whether its process runs
    members: tuple[tuple[str, bool], ...] = ()

    def line(self) -> str:
        """Return it in one line."""
        down = [member for member, runs in self.members if not runs]
        parts = [self.run.line() if self.run else f"{self.title}: no run yet"]
        parts += [f"down: {' '.join(down)}"] if down else []
        return "; ".join(parts)

    def site_rows(self) -> list[tuple[str, ...]]:
        """Return for each site its name, what it does now, and its cost so far."""
        if self.run is None:
            return []
        here, over = self.run.progress, self.run.over
        return [
            (
                site,
                "" if over else _doing(site, self.run),
                clock(said.seconds),
                bytes_text(said.bytes_down),
                bytes_text(said.bytes_up),
                bytes_text(said.peak_memory_bytes) if said.peak_memory_bytes else "-",
                "-" if said.epsilon is None else f"{said.epsilon:.3g}",
            )
            for site, said in sorted(here.sites.items())
        ]


SITE_COLUMNS = ("site", "now", "worked", "down", "up", "peak memory", "epsilon")
Look = Callable[[], View]


def look_at_run(folder: Path) -> View:
    """Return the state of a run; RunDirectoryError if there is none that this version can read."""
    run = look_at(folder)
    return View(run.progress.title, run)


def look_at_deployment(folder: Path) -> View:
    """Return the state of a deployment and of its newest run.

    Raises:
        FedsiloError: there is no deployment, or the run is of another version of fedsilo.
    """
    deployment = read_deployment(folder)
    running = deployment.running()
    members = tuple((member, member in running) for member in deployment.members)
    newest = newest_run(deployment.runs)
    run = look_at(newest) if newest else None
    return View(run.progress.title if run else f"deployment {deployment.folder}", run, members)


def _doing(site: str, run: Watched) -> str:
    here = run.progress
    if site in here.failed:
        return f"left out: {here.failed[site]}"
    if not here.phase or site not in here.asked:
        return ""
    if site in here.answered:
        return "answered"
    return "away" if site in here.away else f"asked to {here.phase}"


_EVERY = 1.0  # seconds between looks


def follow(look: Look, console: Console, every: float = _EVERY) -> None:
    """Show what ``look`` returns until the run is over, or for a deployment until an interrupt.

    Raises:
        FedsiloError: the run has disappeared.
    """
    view = look()
    with Live(render_view(view), console=console, auto_refresh=False, transient=False) as live:
        while view.members or not (view.run and view.run.over):
            time.sleep(every)
            view = look()
            live.update(render_view(view), refresh=True)
    if not console.is_terminal:
        console.print()  # rich leaves out the end of the last line there


def render_view(view: View) -> Group:
    """Return a view for the terminal: a line, and a table of the sites."""
    parts: list[Text | Table] = [Text(view.line())]
    if rows := view.site_rows():
        table = Table(*SITE_COLUMNS)
        for row in rows:
            table.add_row(*map(Text, row))  # Text: a site's own words are not markup
        parts.append(table)
    return Group(*parts)
