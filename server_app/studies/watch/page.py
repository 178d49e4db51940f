"""The page of a running run: what the terminal shows, as HTML."""

from __future__ import annotations

from fedsilo.server_app.records.progress import clock
from fedsilo.server_app.run.watched import (
    Watched,
    epsilon_text,
    phase_text,
    size,
    traffic_text,
)
from fedsilo.server_app.studies.report.page import Facts, Section, Table, Text, page
from fedsilo.server_app.studies.watch.view import SITE_COLUMNS, View

_FOOT = "This page reloads every two seconds. It only reads files; closing it changes nothing."


def watch_page(view: View) -> str:
    """Return the page."""
    run = _facts(view.run) if view.run else Text(["There has been no run yet."])
    sections = [Section("Run", [run])]
    if rows := view.site_rows():
        note = "Bytes and seconds of this run so far, as the server counts them."
        sections.append(Section("Sites", [Table("Sites of the run", SITE_COLUMNS, rows, note)]))
    if view.members:
        pairs = [(member, "running" if runs else "down") for member, runs in view.members]
        sections.append(Section("Deployment", [Facts(pairs)]))
    return page(view.title, sections, subtitle=view.line(), foot=_FOOT)


def _facts(run: Watched) -> Facts:
    here, left = run.progress, run.seconds_left
    pairs = [
        ("state", run.state()),
        ("round", f"{here.round} of {here.rounds}, {here.finished_rounds} finished"),
        ("phase", phase_text(here) if here.phase and not run.over else "-"),
        ("left out so far", str(here.left_out)),
        ("bytes", traffic_text(here)),
        ("differential privacy", epsilon_text(here) or "none"),
        ("memory of the server", size(here.server_memory_bytes)),
        ("time", clock(run.seconds)),
        ("time left", "-" if left is None else f"about {clock(left)}"),
    ]
    return Facts(pairs)
