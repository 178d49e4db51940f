"""The page that lists the runs in a folder."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedsilo.core.one_line import as_word, format_count
from fedsilo.reports.watch.live_page import render_live
from fedsilo.reports.watch.run_folder import NamedRun, RunFolder

# Seconds that one look may take to read the metrics of runs. A thousand finished runs take longer,
# and their metrics appear at the next looks
_PATIENCE = 0.5
_NOT_READ_YET = "…"


def list_page(folder: RunFolder) -> str:
    """Build the HTML page that lists the runs in a folder, with a form to compare two runs.

    Reading the metrics of many runs takes time. The first call for ``folder`` therefore reads no
    metrics, and shows only those that are cached. Each later call reads metrics for at most about
    half a second. Until its metrics are read, a run shows "…".

    Raises:
        RunDirectoryError: the folder does not exist or cannot be read.
    """
    runs = folder.runs()
    until = time.monotonic()
    # The first page appears at once, and its metrics a moment later
    if folder.was_listed:
        until += _PATIENCE
    folder.was_listed = True
    rows, names = [], []
    for one in runs:
        rows.append(_row(folder, one, until))
        if one.run.state != "unreadable":
            names.append(one.name)
    data = {
        "folder": as_word(folder.folder),
        "counts": _counts([one.run.state for one in runs]),
        "rows": rows,
        "names": names,
    }
    title = f"Runs in {folder.folder.name}"
    return render_live("runs.html", title, data, subtitle=str(folder.folder), has_list=False)


def _counts(states: Sequence[str]) -> str:
    """Describe how many runs there are, and how many are in each state.

    The states are in alphabetical order. Without runs, the text says that there are none yet.
    """
    if not states:
        return "There are no runs in this folder yet."
    parts = []
    for state, count in sorted(Counter(states).items()):
        parts.append(f"{count} {state}")
    return f"{format_count(len(states), 'run')}: {', '.join(parts)}."


def _row(folder: RunFolder, one: NamedRun, until: float) -> dict[str, Any]:
    """Build the template variables for a run's row in the list of runs.

    They include the run's name, state and settings, and ``headline``, a summary of its metrics. The
    summary is "-" if the run has no metrics, and empty if the run is unreadable. Metrics that are
    not cached are read only while ``time.monotonic()`` is below ``until``. After that, ``headline``
    is "…".
    """
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
