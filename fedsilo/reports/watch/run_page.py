"""The page of a run, of a deployment with its newest run, or of a hospital's node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsilo.core.errors import RunDirectoryError
from fedsilo.core.one_line import as_word
from fedsilo.pages.page import Table, share
from fedsilo.reports.watch.live_page import render_live
from fedsilo.reports.watch.measured import Measured
from fedsilo.reports.watch.run_folder import RunFolder
from fedsilo.reports.watch.view import (
    SITE_COLUMNS,
    View,
    Watched,
    epsilon_text,
    phase_text,
    traffic_text,
)
from fedsilo.server_app.records.failures import read_failures
from fedsilo.server_app.records.progress import bytes_text, clock
from fedsilo.server_app.records.run_directory import RunDirectory

_FAILURES = 10  # the last messages without a usable answer that the page lists
# Descriptions of a run's pictures, for readers who cannot see them
_PICTURES = {
    "buffer.png": "attention maps of each site, by class",
    "closeness.png": "weights of the edges between sites, by round",
    "contributions.png": "size and direction of each site's update, by round",
    "cross.png": "metrics of all hospitals' models at all hospitals",
    "curves.png": "learning curves by distribution",
    "distribution.png": "samples of each class at each site",
    "evidence.png": "reliability diagram, and accuracy against vacuity",
    "forgotten.png": "share of forgotten samples of each site, by epoch",
    "prototype-distances.png": "distances between the prototypes of the experts",
    "routing-matrix.png": "mean weights of the experts at each hospital",
    "routing.png": "weights of the experts by hospital",
    "topology.png": "which site sends to which",
}


def run_page(view: View, runs: RunFolder | None, *, has_list: bool = True) -> str:
    """Build the HTML page that shows the progress of a run, a deployment or a hospital's node.

    A run's page has its state, curves, metrics, sites and files. A deployment's page has its
    members, which are the server and the sites, and its newest run. A hospital's page has the facts
    about its messages.

    Args:
        view: the state to show. Without a run, the parts about the run are left out.
        runs: the folder of the run, from which its metrics and files are read. None for a hospital.
        has_list: whether the page links to the list of all runs, and offers to compare the run with
            other runs. If it is False, the page does not name other runs.
    """
    run = None
    if view.run and runs:
        run = _run_data(view.run, runs)
    members = []
    for member, is_running in view.members:
        members.append((member, "running" if is_running else "down"))
    hospital = None
    if view.hospital:
        hospital = view.hospital.facts()
    data = {
        "run": run,
        "sites": _site_table(view),
        "members": members,
        "hospital": hospital,
        "others": _other_runs(view, runs) if has_list else [],
    }
    title, subtitle = view.title, ""
    if view.run:
        title, subtitle = view.run.progress.run, view.title
    return render_live("watch.html", title, data, subtitle=subtitle, has_list=has_list)


def _run_data(run: Watched, runs: RunFolder) -> dict[str, Any]:
    """Build the template variables of a run: its state, facts, curves, metrics, failures and files.

    If the run's process was killed, the state is "interrupted". Before the first round has ended,
    there are no metrics to read yet, so the curves and metrics are missing and ``fault`` is empty.
    If the metrics cannot be read later, ``fault`` has the error. The curves and metrics are then
    those that were last read, or missing.
    """
    name = _name_of(run.folder, runs)
    measured = runs.measured.read(run.folder)
    fault = ""
    if run.progress.finished_rounds:  # before, the files are not written yet
        fault = runs.measured.fault(run.folder)
    state: str = run.progress.state
    if run.gone:
        state = "interrupted"
    pictures, documents = _shown_files(runs, name)
    return {
        "name": name,
        "state": state,
        "now": run.in_words(),
        "finished": run.progress.finished_rounds,
        "rounds": max(1, run.progress.rounds),
        "facts": _facts(run),
        "curves": measured.pictures if measured else [],
        "fault": fault,
        "metrics": _metric_table(measured) if measured else None,
        "failures": _failures(run.folder),
        "has_ended": RunDirectory(run.folder).has_ended(),
        "pictures": pictures,
        "documents": documents,
        "command": f"fedsilo report {as_word(run.folder)} --out report.html",
    }


def _site_table(view: View) -> Table:
    """Build the table of the sites' states, with the columns of ``SITE_COLUMNS``.

    If the run is over, the column ``now``, with the site's present work, is left out.
    """
    columns, rows = list(SITE_COLUMNS), [list(row) for row in view.site_rows()]
    if view.run and view.run.over:
        place = columns.index("now")
        for cells in [columns, *rows]:
            del cells[place]
    note = "Bytes and seconds of this run so far, as the server counts them."
    return Table("State of each site", columns, rows, note)


def _shown_files(runs: RunFolder, name: str) -> tuple[list[dict[str, str]], list[str]]:
    """Separate a run's PNG pictures from its other files, so that its page can show them.

    Returns:
        A pair. The first element has a dictionary for each picture. ``file`` is its name. ``shows``
        is its description, or the name if there is none. ``paper`` is the name of a PDF of the same
        picture, or empty. The second element has the names of all other files, without these PDFs.
    """
    others = runs.files(name)
    pictures = []
    for file in list(others):
        if not file.endswith(".png"):
            continue
        others.remove(file)
        paper = file.removesuffix("png") + "pdf"
        if paper in others:
            others.remove(paper)
        else:
            paper = ""
        pictures.append({"file": file, "shows": _PICTURES.get(file, file), "paper": paper})
    return pictures, others


def _name_of(run_dir: Path, runs: RunFolder) -> str:
    """Return the name by which pages link to a run."""
    if run_dir == runs.folder:
        return run_dir.name
    return run_dir.relative_to(runs.folder).as_posix()


def _facts(run: Watched) -> list[tuple[str, str]]:
    """List the facts about a run for its live page, as pairs (name, text).

    The facts are the method, data set, seed, start, finished rounds, phase, time so far, time left,
    bytes, spent epsilon, memory of the server's process, and number of messages without a usable
    reply. Between phases and after the run, the phase is left out. An unknown time left is omitted.
    Without differential privacy, the text for epsilon is "none".
    """
    progress = run.progress
    facts = [
        ("method", progress.method),
        ("data set", progress.dataset),
        ("seed", str(progress.seed)),
        ("started", f"{progress.started:%Y-%m-%d %H:%M} UTC"),
        ("rounds", f"{progress.finished_rounds} of {progress.rounds} finished"),
    ]
    if progress.phase and not run.over:
        facts.append(("phase", phase_text(progress)))
    facts.append(("time", clock(run.seconds)))
    if run.seconds_left is not None:
        facts.append(("time left", f"about {clock(run.seconds_left)}"))
    facts += [
        ("bytes", traffic_text(progress)),
        ("differential privacy", epsilon_text(progress) or "none"),
        ("memory of the server", bytes_text(progress.server_memory_bytes)),
        ("messages left out", str(progress.left_out)),
    ]
    return facts


def _metric_table(measured: Measured) -> Table | None:
    """Build the table of a run's main metrics in the last round, with a row for each site.

    The sites are in alphabetical order, and a missing value is "n/a". A last row has the means,
    unless there is only one site. If none of the main metrics was measured, the result is None.
    """
    if not measured.metrics:
        return None
    sites: dict[str, None] = {}
    values = {}
    for metric in measured.metrics:
        values[metric] = measured.last_of_sites(metric)
        sites |= dict.fromkeys(values[metric])
    rows = []
    for site in sorted(sites):
        rows.append([site, *(share(values[metric].get(site)) for metric in measured.metrics)])
    if len(rows) > 1:
        rows.append(["mean", *(share(measured.last_mean(metric)) for metric in measured.metrics)])
    caption = f"Metrics on {measured.split} samples, round {measured.last_round}"
    note = "n/a: not measured, or over too few samples of a class to be shown."
    return Table(caption, ["site", *measured.metrics], rows, note)


def _failures(run_dir: Path) -> Sequence[Sequence[str]]:
    """List the last ten messages without a usable answer from a site, the newest first.

    A row has the round, the phase, the site and the cause. If the file that records failures is
    damaged, the only row has the error.
    """
    try:
        failures = read_failures(RunDirectory(run_dir))
    except RunDirectoryError as error:
        return [["-", "-", "-", str(error)]]
    rows = []
    for failure in failures[: -_FAILURES - 1 : -1]:
        row = [str(failure[key]) for key in ("round", "phase", "site", "cause")]
        rows.append(row)
    return rows


def _other_runs(view: View, runs: RunFolder | None) -> list[str]:
    """List the names of the runs with which the user may compare the viewed run.

    These are the other readable runs in the folder, from the last started to the first. If the view
    has no run, or if ``runs`` is None, the list is empty.
    """
    if view.run is None or runs is None:
        return []
    names = []
    for one in runs.runs():
        if one.run.path != view.run.folder and one.run.state != "unreadable":
            names.append(one.name)
    return names
