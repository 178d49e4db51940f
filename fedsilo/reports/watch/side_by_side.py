"""The page that shows two runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsilo.core.errors import RunDirectoryError
from fedsilo.core.settings_schema import Value
from fedsilo.pages.page import NONE, Picture, Table, share
from fedsilo.reports.run_facts import value_text
from fedsilo.reports.watch.live_curves import OVER, Line, draw_curve
from fedsilo.reports.watch.live_page import render_live
from fedsilo.reports.watch.measured import Measured
from fedsilo.reports.watch.run_folder import RunFolder
from fedsilo.reports.watch.view import Watched, look_at, traffic_text
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.records.progress import clock
from fedsilo.server_app.records.run_directory import RunDirectory


@dataclass(frozen=True)
class _Side:
    """One of the two runs."""

    name: str
    state: Watched
    measured: Measured | None

    def line(self, metric: str) -> Line:
        """Return round -> mean of a metric over sites; empty before the first round."""
        if self.measured is None:
            return {}
        return self.measured.line(metric)

    def last_of_sites(self, metric: str) -> Mapping[str, float]:
        """Return site -> the metric in the last round; empty before the first round."""
        if self.measured is None:
            return {}
        return self.measured.last_of_sites(metric)


def side_by_side_page(runs: RunFolder, names: Sequence[str]) -> str:
    """Build the HTML page that compares two runs.

    It has the facts, the curves and the metrics by site of both runs. It also lists the settings in
    which they differ.

    Args:
        runs: the folder with the runs.
        names: the names of the two runs, which may be the same.

    Raises:
        RunDirectoryError: a run does not exist, or cannot be read.
    """
    left, right = [_open_side(runs, name) for name in names]
    both_ended = all(RunDirectory(one.state.folder).has_ended() for one in (left, right))
    differing, fault = _settings(left, right)
    data = {
        "names": names,
        "all_names": _names(runs),
        "facts": _facts(left, right),
        "curves": _curves(left, right),
        "sites": _site_tables(left, right),
        "other_data": left.state.progress.dataset != right.state.progress.dataset,
        "differing": differing,
        "fault": fault,
        "both_ended": both_ended,
    }
    return render_live(
        "side_by_side.html", "Two runs side by side", data, subtitle=" · ".join(names)
    )


def _open_side(runs: RunFolder, name: str) -> _Side:
    """Read the state and the metrics of a run."""
    path = runs.find(name)
    return _Side(name, look_at(path), runs.measured.read(path))


def _names(runs: RunFolder) -> list[str]:
    """Return the names of all runs that can be read."""
    return [one.name for one in runs.runs() if one.run.state != "unreadable"]


def _facts(left: _Side, right: _Side) -> list[list[str]]:
    """Build the rows of the table that compares the facts of two runs.

    The facts are the state, method, data set, seed, rounds, result, bytes and time. A row has the
    name of the fact, and its text for the left and the right run. An unknown text is "n/a".
    """
    columns: list[dict[str, str]] = []
    for side in (left, right):
        progress = side.state.progress
        state: str = progress.state
        if side.state.gone:
            state = "interrupted"
        columns.append(
            {
                "state": state,
                "method": progress.method,
                "data set": progress.dataset,
                "seed": str(progress.seed),
                "rounds": f"{progress.finished_rounds} of {progress.rounds}",
                "result": side.measured.summary() if side.measured else "",
                "bytes": traffic_text(progress),
                "time": clock(side.state.seconds),
            }
        )
    first, second = columns
    return [[key, first[key] or NONE, second[key] or NONE] for key in first]


def _curves(left: _Side, right: _Side) -> list[Picture]:
    """Draw the metrics of two runs over rounds, with one picture for each main metric of both.

    A picture has a line for each run. A run's metrics are those on test samples, or on validation
    samples if it has no test metrics. If one run has test metrics and the other has only validation
    metrics, the list is empty. It is also empty if the metrics of a run cannot be read.
    """
    pictures: list[Picture] = []
    split = _common_split(left, right)
    if not split or left.measured is None:
        return pictures
    titles = [left.name, right.name]
    if left.name == right.name:
        titles[1] = f"{right.name} again"  # a title names only one line
    for metric in left.measured.metrics:
        lines = dict(zip(titles, (left.line(metric), right.line(metric)), strict=True))
        if all(lines.values()):
            picture = draw_curve(f"two-{metric}", lines, f"{split} {metric}", OVER, share)
            pictures += [picture] if picture else []
    return pictures


def _common_split(left: _Side, right: _Side) -> str:
    """Return the split, "test" or "val", whose metrics are shown for both runs.

    A run's metrics are shown on test samples, or on validation samples if it has no test metrics.
    If the splits of the two runs differ, the result is empty. It is also empty if the metrics of a
    run cannot be read, for example before the end of its first round.
    """
    if left.measured is None or right.measured is None:
        return ""
    if left.measured.split != right.measured.split:
        return ""
    return left.measured.split


def _site_tables(left: _Side, right: _Side) -> list[Table]:
    """Build the tables that compare the runs' metrics in their last rounds.

    Each main metric that both runs have gets a table. The table has a row for each site of either
    run, and a last row for the means. A row has the left value, the right value, and right minus
    left. A missing number is "n/a". If the metrics of the runs are on different splits, the list is
    empty.
    """
    split = _common_split(left, right)
    if not split or left.measured is None or right.measured is None:
        return []
    tables = []
    for metric in left.measured.metrics:
        first, second = left.last_of_sites(metric), right.last_of_sites(metric)
        if not first or not second:
            continue
        rows = []
        for site in sorted({*first, *second}):
            rows.append([site, *_pair(first.get(site), second.get(site))])
        means = left.measured.last_mean(metric), right.measured.last_mean(metric)
        rows.append(["mean", *_pair(*means)])
        columns = ["site", left.name, right.name, "difference"]
        rounds = f"round {left.measured.last_round} and round {right.measured.last_round}"
        tables.append(Table(f"{split} {metric}, {rounds}", columns, rows))
    return tables


def _pair(first: float | None, second: float | None) -> tuple[str, str, str]:
    """Format two values and the second minus the first."""
    difference = NONE
    if first is not None and second is not None:
        difference = f"{second - first:+.3f}"
    return share(first), share(second), difference


def _settings(left: _Side, right: _Side) -> tuple[list[list[str]], str]:
    """Compare the settings that decide the results of two runs.

    Settings without influence on the result, such as a run's name, are not compared. If only one
    run has a setting, the value of the other run is "-".

    Returns:
        A pair. The first element has a row [key, left value, right value] for each setting that
        differs. The second element is the error if the settings of a run cannot be read, and
        otherwise empty. After an error, there are no rows.
    """
    try:
        first = FinishedRun(left.state.folder).settings.decisive()
        second = FinishedRun(right.state.folder).settings.decisive()
    except RunDirectoryError as error:
        return [], str(error)
    rows = []
    for key in [*first, *(key for key in second if key not in first)]:
        if first.get(key) != second.get(key):
            rows.append([key, _value(first, key), _value(second, key)])
    return rows, ""


def _value(settings: Mapping[str, Value], key: str) -> Any:
    """Format a setting, or "-" if the run's method does not have it."""
    if key not in settings:
        return "-"
    return value_text(settings[key])
