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
from fedsilo.server_app.run.terminal import fit_table


@dataclass(frozen=True)
class View:
    """The state at one moment."""

    title: str
    run: Watched | None  # None: a deployment has had no run yet
    # A deployment's server and sites, each with whether its process runs
    members: tuple[tuple[str, bool], ...] = ()

    def line(self) -> str:
        """Describe the state in one line."""
        parts = [f"{self.title}: no run yet"]
        if self.run:
            parts = [self.run.line()]
        down = [member for member, runs in self.members if not runs]
        if down:
            parts.append(f"down: {' '.join(down)}")
        return "; ".join(parts)

    def site_rows(self) -> list[tuple[str, ...]]:
        """Return a row for each site: its name, what it does now, and its cost so far."""
        if self.run is None:
            return []
        rows: list[tuple[str, ...]] = []
        for site, progress in sorted(self.run.progress.sites.items()):
            peak = epsilon = "-"
            if progress.peak_memory_bytes:
                peak = bytes_text(progress.peak_memory_bytes)
            if progress.epsilon is not None:
                epsilon = f"{progress.epsilon:.3g}"
            row = (
                site,
                _doing(site, self.run),
                clock(progress.seconds),
                bytes_text(progress.bytes_down),
                bytes_text(progress.bytes_up),
                peak,
                epsilon,
            )
            rows.append(row)
        return rows


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
    if newest is None:
        return View(f"deployment {deployment.folder}", None, members)
    run = look_at(newest)
    return View(run.progress.title, run, members)


def _doing(site: str, run: Watched) -> str:
    """Describe what a site does now; empty if the run is over or the site has not been asked."""
    here = run.progress
    if run.over:
        return ""
    if site in here.failed:
        return f"left out: {here.failed[site]}"
    if not here.phase or site not in here.asked:
        return ""
    if site in here.answered:
        return "answered"
    if site in here.away:
        return "away"
    return f"asked to {here.phase}"


_EVERY = 1.0  # seconds between looks


def follow(look: Look, console: Console, every: float = _EVERY) -> None:
    """Show what ``look`` returns until the run is over, or for a deployment until an interrupt.

    Raises:
        FedsiloError: the run has disappeared.
    """
    view = look()
    shown = render_view(view, console.width)
    with Live(shown, console=console, auto_refresh=False, transient=False) as live:
        # A deployment goes on after its run, a run does not
        while view.members or not (view.run and view.run.over):
            time.sleep(every)
            view = look()
            live.update(render_view(view, console.width), refresh=True)
    if not console.is_terminal:
        console.print()  # rich leaves out the end of the last line there


def render_view(view: View, width: int) -> Group:
    """Build a view for a terminal of ``width`` characters: a line, and a table of the sites."""
    parts: list[Text | Table] = [Text(view.line())]
    rows = view.site_rows()
    if rows:
        table = Table(*SITE_COLUMNS)
        for row in rows:
            table.add_row(*map(Text, row))  # Text: a site's own words are not markup
        parts += fit_table(table, width)
    return Group(*parts)
