"""The page that lists the runs in a folder."""

import time
from typing import Any

from fedsilo.reports.watch.live_page import render_live
from fedsilo.reports.watch.run_folder import NamedRun, RunFolder

# Seconds that one look may take to read the metrics of runs. A thousand finished runs take longer,
# and their metrics appear at the next looks
_PATIENCE = 0.5
_NOT_READ_YET = "…"


def list_page(folder: RunFolder, *, title: str = "") -> str:
    """Build the page with a row for each run, and a form that shows two runs side by side.

    Args:
        folder: the folder with the runs.
        title: the page's title; empty for the folder's path.

    Raises:
        RunDirectoryError: the folder does not exist or cannot be read.
    """
    runs = folder.runs()
    until = time.monotonic() + _PATIENCE
    rows, names = [], []
    for one in runs:
        rows.append(_row(folder, one, until))
        if one.run.state != "unreadable":
            names.append(one.name)
    data = {"folder": str(folder.folder), "rows": rows, "names": names}
    return render_live("runs.html", title or "Runs", data, subtitle=str(folder.folder))


def _row(folder: RunFolder, one: NamedRun, until: float) -> dict[str, Any]:
    """Build the variables of a row. Metrics are read until ``until``, then only known ones."""
    run, measured = one.run, None
    headline = ""
    if run.state != "unreadable":
        headline = _NOT_READ_YET
        if time.monotonic() < until or folder.measured.is_known(run.path):
            measured = folder.measured.read(run.path)
            headline = "-"
    if measured is not None:
        headline = measured.summary() or "-"
    return {
        "name": one.name,
        "state": run.state,
        "method": run.method,
        "dataset": run.dataset,
        "seed": run.seed,
        "rounds": run.rounds,
        "headline": headline,
        "started": run.started,
        "note": run.note,
    }
