"""``fedsilo crossvalidate``: repeated stratified cross-validation over each site's rows.

Every experiment is run on the same splits, so that methods are compared run by run; the first
experiment is the one that the others are compared with.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from datasets.io.atomic_files import write_atomically
from datasets.registry import data_fingerprint, data_set
from models.contract.errors import SettingError
from models.contract.settings_schema import Value
from server_app.compare.corrected_interval import Interval, corrected_interval
from server_app.compare.trials import Trial, run_trials
from server_app.config.settings import RunSettings, resolve
from server_app.records.summary import print_table
from server_app.run.planning import planned
from server_app.run.progress_bars import make_console

HEADER = ("experiment", "compared with", "group", "metric", "mean", "low", "high", "p", "runs")

Summaries = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """A figure with its interval; ``against`` names the experiment it is a difference to."""

    experiment: str
    against: str
    group: str
    metric: str
    interval: Interval


def crossvalidate(options: argparse.Namespace) -> None:
    """Run what is missing, then print and write the tables.

    Raises:
        FedsiloError: the data set has no folds, a setting is wrong, or a run failed.
    """
    names = list(dict.fromkeys(options.experiments))
    plans = {name: planned(name, options)[0] for name in names}
    trials = {
        name: _trials(settings, options.folds, options.repeats) for name, settings in plans.items()
    }
    console = make_console()
    runs = options.folds * options.repeats
    console.print(
        f"{len(names)} experiments, {options.folds} folds, {options.repeats} repeats: "
        f"{len(names) * runs} runs",
        highlight=False,
    )
    first = plans[names[0]].common
    for name, settings in plans.items():
        if (settings.common.dataset, settings.common.data_dir) != (first.dataset, first.data_dir):
            raise SettingError(
                f"experiment '{name}' is on other data than '{names[0]}': methods are compared on "
                "the same splits; name experiments of one data set"
            )
    every = [trial for name in names for trial in trials[name]]
    found = run_trials(every, Path(first.out) / "crossvalidation", options.jobs)
    summaries = {name: found[i * runs : (i + 1) * runs] for i, name in enumerate(names)}
    metrics = data_set(first.dataset).headline
    rows = figure_rows(summaries, metrics, options.folds)
    rows += difference_rows(summaries, metrics, options.folds)
    for metric in metrics:
        print_table(console, metric_table(rows, metric))
    if options.csv:
        write_atomically(options.csv, csv_text(rows))
    if options.markdown:
        write_atomically(options.markdown, markdown_text(rows, metrics))


def _trials(settings: RunSettings, folds: int, repeats: int) -> list[Trial]:
    base, data = settings.as_mapping(), data_fingerprint(settings.common)
    if "test-folds" not in data_set(str(base["dataset"])).settings:
        raise SettingError(
            f"data set '{base['dataset']}' has a split of its own and no folds: use 'fedsilo "
            "compare' with several seeds"
        )
    found = []
    for repeat in range(repeats):
        for fold in range(folds):
            cut: dict[str, Value] = {
                "test-folds": folds,
                "test-fold": fold,
                "fold-seed": repeat,
                "seed": repeat,
                "evaluate-every": 0,
                "run-name": "",
            }
            found.append(Trial(resolve({**base, **cut}), {"repeat": repeat, "fold": fold}, data))
    return found


def figure_rows(
    summaries: Mapping[str, Summaries], metrics: Sequence[str], folds: int
) -> list[Row]:
    """Return each experiment's figures, per site and in the mean over sites.

    A metric that a site's test rows leave undefined in some run (AUC of one class) is given over
    the other runs, and the site is no part of its mean over sites.
    """
    rows = []
    for name, found in summaries.items():
        for metric in metrics:
            for group, values in _by_group(found, metric).items():
                known = [value for value in values if value is not None]
                if known:  # all metrics are shares: an interval beyond them says nothing
                    interval = corrected_interval(known, folds).within(0.0, 1.0)
                    rows.append(Row(name, "", group, metric, interval))
    return rows


def difference_rows(
    summaries: Mapping[str, Summaries], metrics: Sequence[str], folds: int
) -> list[Row]:
    """Return the first experiment's figures minus each other's, run by run on the same split."""
    first, *others = summaries
    rows = []
    for other in others:
        for metric in metrics:
            mine, theirs = (_by_group(summaries[name], metric) for name in (first, other))
            for group in mine:
                pairs = zip(mine[group], theirs[group], strict=True)
                known = [a - b for a, b in pairs if a is not None and b is not None]
                if known:
                    rows.append(Row(first, other, group, metric, corrected_interval(known, folds)))
    return sorted(rows, key=lambda row: (others.index(row.against), metrics.index(row.metric)))


def _by_group(found: Summaries, metric: str) -> dict[str, list[float | None]]:
    """Return, per site and for ``all``, the metric's value in each run, None where undefined."""
    sites = sorted({site for summary in found for site in summary["sites"]})
    by_site = {
        site: [summary["sites"].get(site, {}).get(metric) for summary in found] for site in sites
    }
    whole = [values for values in by_site.values() if None not in values]
    mean: list[float | None] = [sum(run) / len(run) for run in zip(*whole, strict=True)]
    return {**by_site, "all": mean}


def metric_table(rows: Sequence[Row], metric: str) -> Table:
    """Return one metric's table: a line per experiment, then the paired differences."""
    chosen = [row for row in rows if row.metric == metric]
    groups = list(dict.fromkeys(row.group for row in chosen if not row.against))
    table = Table(title=f"test {metric}: mean and 95 % interval", title_justify="left")
    table.add_column("experiment")
    for group in groups:
        table.add_column(group, justify="right")
    for label, cells in _lines(chosen, groups):
        narrow = [cell.replace(" [", "\n[").replace(" p=", "\np=") for cell in cells]
        table.add_row(label, *narrow, end_section=True)
    return table


def _lines(rows: Sequence[Row], groups: Sequence[str]) -> list[tuple[str, list[str]]]:
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        label = f"{row.experiment} less {row.against}" if row.against else row.experiment
        found.setdefault(label, {})[row.group] = _cell(row)
    return [(label, [cells.get(group, "") for group in groups]) for label, cells in found.items()]


def _cell(row: Row) -> str:
    one, sign = row.interval, "+" if row.against else ""
    if one.low is None:
        return f"{one.mean:{sign}.3f} (1 run)"
    p = f" p={one.p:.3f}" if row.against else ""
    return f"{one.mean:{sign}.3f} [{one.low:{sign}.3f}, {one.high:{sign}.3f}]{p}"


def markdown_text(rows: Sequence[Row], metrics: Sequence[str]) -> str:
    """Return the tables as Markdown, one per metric."""
    parts = []
    for metric in metrics:
        chosen = [row for row in rows if row.metric == metric]
        groups = list(dict.fromkeys(row.group for row in chosen if not row.against))
        lines = [["experiment", *groups], ["---"] * (len(groups) + 1)]
        lines += [[label, *cells] for label, cells in _lines(chosen, groups)]
        body = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        parts.append(f"**{metric}**, mean and 95 % interval\n\n{body}")
    return "\n".join(parts)


def csv_text(rows: Sequence[Row]) -> str:
    """Return all figures as tidy CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    for row in rows:
        one = row.interval
        figures = ["" if v is None else f"{v:.6f}" for v in (one.mean, one.low, one.high, one.p)]
        writer.writerow([row.experiment, row.against, row.group, row.metric, *figures, one.runs])
    return text.getvalue()
