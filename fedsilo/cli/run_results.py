"""Shows the list of runs, and deletes runs after a question."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from fedsilo.cli.printing import AsJson, line, print_columns
from fedsilo.core.errors import SettingError
from fedsilo.core.one_line import as_word, format_count
from fedsilo.reports.watch.run_list import ListedRun
from fedsilo.server_app.records.progress import bytes_text

_RUN_COLUMNS = ("run", "state", "method", "data set", "seed", "rounds", "started (UTC)", "size")


def runs(
    found: list[ListedRun],
    *,
    delete: Annotated[bool, "delete the listed runs, after a question"] = False,
    yes: Annotated[bool, "delete without a question"] = False,
    as_json: AsJson = False,
) -> None:
    """Print a table of runs, or JSON, and delete the runs if ``delete`` is set.

    If there are no runs, a line says so. Below the table, each run with a note gets a line. Before
    the first run is deleted, the user is asked, unless ``yes`` is set. A line is printed for each
    deleted run, unless ``as_json`` is set.

    Raises:
        SettingError: the user cannot be asked, because standard input is not a terminal.
        RunDirectoryError: a run cannot be deleted. The runs before it have been deleted.
    """
    if as_json:
        line(json.dumps([run.document() for run in found], indent=2))
    elif not found:
        line("no runs here")
    else:
        print_columns(_RUN_COLUMNS, [_run_cells(run) for run in found])
        for run in found:
            if run.note:
                line(f"{as_word(run.path)}: {run.note}")
    if delete and found:
        _delete_runs(found, yes, quietly=as_json)


def _delete_runs(found: list[ListedRun], yes: bool, quietly: bool) -> None:
    """Delete runs after the user has agreed. If the user refuses, nothing is deleted.

    Args:
        found: the runs to delete, in this order.
        yes: whether to delete without asking the user.
        quietly: whether to leave out the line for each deleted run.

    Raises:
        SettingError: the user cannot be asked, because standard input is not a terminal.
        RunDirectoryError: a run cannot be deleted. The runs before it have been deleted.
    """
    size = bytes_text(sum(run.bytes for run in found))
    what = f"{format_count(len(found), 'run')} ({size})"
    if not yes:
        if not sys.stdin.isatty():
            raise SettingError(f"--delete asks before it deletes {what}: add --yes to confirm")
        if not typer.confirm(f"delete {what}? This cannot be undone", err=True):
            return
    for run in found:
        run.delete()
        # JSON is one document, which has the deleted runs already
        if not quietly:
            line(f"deleted {as_word(run.path)}")


def _run_cells(run: ListedRun) -> list[str]:
    """Format a run as the cells of a table row.

    The cells are the path, state, method, data set, seed, rounds, start time and size. An unknown
    value is "-".
    """
    seed = "-"
    if run.seed is not None:
        seed = str(run.seed)
    facts = [run.method, run.dataset, seed, run.rounds, run.started]
    known = [fact or "-" for fact in facts]
    return [as_word(run.path), run.state, *known, bytes_text(run.bytes)]
