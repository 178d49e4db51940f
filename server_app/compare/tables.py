"""The rows of a comparison, and its tables: for a terminal, as Markdown, as tidy CSV."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rich.table import Table

from models.contract.errors import SettingError
from server_app.records.summary import by_distribution, means

HEADER = (
    "experiment",
    "method",
    "group",
    "metric",
    "mean",
    "sd",
    "seeds",
    "published",
    "published sd",
    "median",
    "min",
    "max",
)


@dataclass(frozen=True)
class Row:
    """One figure of the comparison; ``group`` is a site, a distribution or ``all``.

    ``values`` holds it for each seed that has it, at least one.
    """

    experiment: str
    method: str
    group: str
    metric: str
    values: tuple[float, ...]
    published: float | None = None
    published_sd: float | None = None

    @property
    def seeds(self) -> int:
        """Return how many seeds have the figure."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """Return the mean over seeds."""
        return statistics.mean(self.values)

    @property
    def sd(self) -> float:
        """Return the sample standard deviation over seeds, 0 for a single one."""
        return statistics.stdev(self.values) if self.seeds > 1 else 0.0

    @property
    def median(self) -> float:
        """Return the median over seeds."""
        return statistics.median(self.values)

    def cell(self, median: bool = False) -> str:
        """Return mean and standard deviation for people, or median and range.

        A single seed has neither.
        """
        if self.seeds == 1:
            return f"{self.mean:.3f}"
        if median:
            return f"{self.median:.3f} ({min(self.values):.3f} to {max(self.values):.3f})"
        return f"{self.mean:.3f} ± {self.sd:.3f}"

    def published_cell(self) -> str:
        """Return the paper's figure."""
        if self.published is None:
            return ""
        sd = "" if self.published_sd is None else f" ± {self.published_sd:.3f}"
        return f"{self.published:.3f}{sd}"


def of_split(summary: Mapping[str, Any], split: str) -> dict[str, Any]:
    """Return ``summary`` with the figures of ``split``: test as they stand, or val.

    Choices between settings are made on validation figures; the papers published no such.
    """
    if split == "test":
        return dict(summary)
    return {**summary, **summary["validation"], "published": None}


def chosen_metrics(asked: str, summaries: Sequence[Mapping[str, Any]], option: str) -> list[str]:
    """Return the metrics of the runs that ``asked`` names, in its order.

    Args:
        asked: names and shell-style patterns, parted by commas.
        summaries: the runs', of the split that is shown.
        option: of the command, for the error.

    Raises:
        SettingError: a name or pattern fits no metric of any run.
    """
    there = sorted({metric for summary in summaries for metric in summary["mean"]})
    found: dict[str, None] = {}
    for pattern in [part.strip() for part in asked.split(",")]:
        fitting = [m for m in there if m == pattern or fnmatchcase(m, pattern)]
        if not fitting:
            raise SettingError(
                f"{option}: no run has a metric '{pattern}'; there are {', '.join(there)}"
            )
        found |= dict.fromkeys(fitting)
    return list(found)


def experiment_rows(
    experiment: str, summaries: Sequence[Mapping[str, Any]], metrics: Sequence[str]
) -> list[Row]:
    """Return the rows of one experiment from its seeds' summaries: distributions, then all.

    A figure that is undefined for a group (AUC of one class) has no row.
    """
    first = summaries[0]
    groups = [*first["distributions"], "all"]
    published = first["published"] or {}
    found = []
    for group in groups:
        for metric in metrics:
            known = [figure_of(summary, group, metric) for summary in summaries]
            values = tuple(value for value in known if value is not None)
            if values:
                paper = published.get(group, {})
                told = (paper.get(metric), paper.get(f"{metric}-sd"))
                found.append(Row(experiment, first["method"], group, metric, values, *told))
    return found


def figure_of(summary: Mapping[str, Any], group: str, metric: str) -> float | None:
    """Return a run's figure of a distribution or ``all``, None where it is undefined."""
    values = summary["mean"] if group == "all" else summary["distributions"][group]
    return float(values[metric]) if metric in values else None


def constant_rows(
    silos: Mapping[str, Any], split: str, metrics: Sequence[str] | None = None
) -> list[Row]:
    """Return what answering the second of two classes every time would score, per distribution.

    A predictor that has seen nothing: what a method's accuracy is to be held against. Nothing is
    returned for more than two classes. ``metrics`` are those shown; None: all.
    """
    scores: dict[str, dict[str, float]] = {}
    for site, facts in silos.items():
        counts = facts["label_counts"][split]
        if len(counts) == 2 and sum(counts):
            scores[site] = _constant_scores(counts[1] / sum(counts))
    if not scores:
        return []
    groups = by_distribution(scores, {site: silos[site]["distribution"] for site in scores})
    return [
        Row("always positive (class 1)", "constant", group, metric, (value,))
        for group, found in [*groups.items(), ("all", means(scores))]
        for metric, value in found.items()
        if metrics is None or metric in metrics
    ]


def _constant_scores(share: float) -> dict[str, float]:
    """Score "always class 1" where ``share`` of the samples are; of one class only accuracy."""
    if share in (0.0, 1.0):
        return {"accuracy": share}
    return {"accuracy": share, "balanced-accuracy": 0.5, "auc": 0.5}


def _lines(rows: Sequence[Row], split: str, median: bool) -> list[list[str]]:
    """Return the column titles, then a line per experiment and group.

    A metric has a column of published figures if there are any.
    """
    metrics = list(dict.fromkeys(row.metric for row in rows))
    told = {row.metric for row in rows if row.published is not None}
    columns = ["experiment", "group"]
    for metric in metrics:
        columns += [f"{split} {metric}", *(["published"] if metric in told else [])]
    by_line: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by_line.setdefault((row.experiment, row.group), {})[row.metric] = row
    lines = [columns]
    for (experiment, group), found in by_line.items():
        line = [experiment, group]
        for metric in metrics:
            one = found.get(metric)
            line.append(one.cell(median) if one else "")
            if metric in told:
                line.append(one.published_cell() if one else "")
        lines.append(line)
    return lines


def comparison_table(rows: Sequence[Row], split: str = "test", median: bool = False) -> Table:
    """Return the comparison for a terminal."""
    seeds = max(row.seeds for row in rows)
    shown = "median (min to max)" if median else "mean ± sd"
    table = Table(title=f"{shown} over {seeds} seeds", title_justify="left")
    columns, *lines = _lines(rows, split, median)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right")
    for line in lines:
        table.add_row(*line, end_section=line[1] == "all")
    return table


def markdown_text(rows: Sequence[Row], split: str = "test", median: bool = False) -> str:
    """Return the comparison as a Markdown table."""
    columns, *lines = _lines(rows, split, median)
    return markdown_table(columns, lines)


def markdown_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as a Markdown table."""
    every = [columns, ["---"] * len(columns), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in every)


def csv_text(rows: Sequence[Row]) -> str:
    """Return the comparison as tidy CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    for row in rows:
        figures = [f"{row.mean:.6f}", f"{row.sd:.6f}", row.seeds]
        paper = ["" if v is None else v for v in (row.published, row.published_sd)]
        spread = [f"{v:.6f}" for v in (row.median, min(row.values), max(row.values))]
        names = [row.experiment, row.method, row.group, row.metric]
        writer.writerow([*names, *figures, *paper, *spread])
    return text.getvalue()
