"""The page of a run that is watched: the same as in the terminal, as HTML."""

from __future__ import annotations

from fedsilo.server_app.records.progress import clock
from fedsilo.server_app.run.watched import epsilon_text, phase_text, size, traffic_text
from fedsilo.server_app.studies.report.page import Facts, Section, Table, Text, page
from fedsilo.server_app.studies.watch.view import SITE_COLUMNS, View

_FOOT = "This page looks again every two seconds. It reads files only; closing it changes nothing."


def watch_page(view: View) -> str:
    """Return the page."""
    sections = [Section("Run", [_facts(view)])] if view.run else [Section("Run", [_NO_RUN])]
    if rows := view.site_rows():
        note = "Bytes and seconds are of this run so far, as the server counts them."
        sections.append(Section("Sites", [Table("Sites of the run", SITE_COLUMNS, rows, note)]))
    if view.members:
        pairs = [(member, "runs" if runs else "down") for member, runs in view.members]
        sections.append(Section("Deployment", [Facts(pairs)]))
    return page(view.title, sections, subtitle=view.line(), foot=_FOOT)


_NO_RUN = Text(["There has been no run yet."])


def _facts(view: View) -> Facts:
    assert view.run is not None
    run, here = view.run, view.run.progress
    left = run.seconds_left
    pairs = [
        ("state", run.state()),
        ("round", f"{here.round} of {here.rounds}, {here.finished_rounds} over"),
        ("phase", phase_text(here) if here.phase and not run.over else "-"),
        ("left out so far", str(here.left_out)),
        ("bytes", traffic_text(here)),
        ("differential privacy", epsilon_text(here) or "none"),
        ("memory of the server", size(here.server_memory_bytes)),
        ("time", clock(run.seconds)),
        ("time left", "-" if left is None else f"about {clock(left)}"),
    ]
    return Facts(pairs)
