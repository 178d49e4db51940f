"""Puts the results of many runs into one tidy table, formats it and draws it.

A tidy table has a row per experiment, group, metric and seed; a group is a site, a distribution or
``all``. ``over_seeds`` reduces it to a row per experiment, group and metric. Only this file makes
tables for the terminal, Markdown, CSV and the picture from them.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from rich.table import Table

from fedsilo.core.drawing.palette import colours
from fedsilo.core.one_line import format_count, markdown_cell
from fedsilo.models.tasks.task import curve_label
from fedsilo.pictures.panel_grids import new_figure
from fedsilo.server_app.records.summary import NONE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIDY = ("experiment", "method", "seed", "group", "metric", "value", "published", "published_sd")
KEY = ["experiment", "group", "metric"]  # the columns that identify a value over seeds
COMPARISON = (
    *("experiment", "method", "group", "metric", "mean", "sd", "seeds"),
    *("published", "published_sd", "median", "min", "max"),
)
_AS_PUBLISHED = ("published", "published_sd")


def tidy(records: Iterable[Sequence[Any]]) -> pd.DataFrame:
    """Build a tidy table, which has one row for each value, from records.

    A record has a value for each column of ``TIDY``: ``experiment``, ``method``, ``seed``,
    ``group``, ``metric``, ``value``, ``published`` and ``published_sd``. The last two are a paper's
    number and its standard deviation, each None if no paper gives it.
    """
    frame = pd.DataFrame(list(records), columns=list(TIDY), dtype=object)
    typed: pd.DataFrame = frame.astype({"seed": int, "value": float})
    return typed


def mean(values: Iterable[float]) -> float:
    """Return the mean of one or more values, computed exactly and rounded only at the end.

    Unlike the mean of pandas, it does not depend on the order of the values.
    """
    return statistics.mean(map(float, values))


def deviation(values: Iterable[float]) -> float:
    """Return the sample standard deviation; 0 for fewer than two values."""
    known = list(map(float, values))
    if len(known) < 2:
        return 0.0
    return statistics.stdev(known)


class Spread(NamedTuple):
    """Statistics of a metric over the seeds of an experiment."""

    mean: float
    sd: float
    seeds: int
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Compute the spread of one or more values."""
        centre, sd = mean(values), deviation(values)
        middle = float(statistics.median(values))
        return cls(centre, sd, len(values), middle, min(values), max(values))


def over_seeds(results: pd.DataFrame) -> pd.DataFrame:
    """Summarise a tidy table over seeds: one row for each experiment, group of sites and metric.

    ``results`` has one row for each value, and so for each seed. The summary adds these columns:

    - the method
    - mean, sample standard deviation, median, minimum and maximum over seeds
    - the number of seeds
    - the published number and its standard deviation

    Rows are in the order in which they first appear in ``results``.
    """
    rows = []
    for key, values in results.groupby(KEY, sort=False)["value"]:
        rows.append((*key, *Spread.of(values.tolist())))
    spreads = pd.DataFrame(rows, columns=[*KEY, *Spread._fields])
    # Method and published numbers are equal for all seeds, so the first row has them
    facts = results.drop_duplicates(KEY)[[*KEY, "method", *_AS_PUBLISHED]]
    return spreads.merge(facts, on=KEY)[list(COMPARISON)]


def p_text(p: float) -> str:
    """Format a p value with three decimals, such as ``0.029``, or ``< 0.001``."""
    if p < 0.001:
        return "< 0.001"
    return f"{p:.3f}"


def p_equation(p: float) -> str:
    """Format a p value as ``p = 0.029`` or ``p < 0.001``."""
    text = p_text(p)
    if text.startswith("<"):
        return f"p {text}"
    return f"p = {text}"


def spread_cell(spread: Any, median: bool = False) -> str:
    """Format a metric's values over seeds as "mean ± sample standard deviation".

    Numbers have three decimals. With ``median``, the format is "median (min to max)". If there is
    only one seed, only its value is formatted. ``spread`` is a ``Spread``, or a row of
    ``over_seeds``.
    """
    if spread.seeds == 1:
        return f"{spread.mean:.3f}"
    if median:
        return f"{spread.median:.3f} ({spread.min:.3f} to {spread.max:.3f})"
    return f"{spread.mean:.3f} ± {spread.sd:.3f}"


def _next_to_published(spread: Any, median: bool) -> str:
    """Format a metric's values over seeds for a cell next to a paper's numbers.

    The cell is that of ``spread_cell``, for example "mean ± sample standard deviation". If the
    paper prints a deviation, the population deviation over seeds follows in brackets, since papers
    with deviations print that kind. There are no brackets with ``median`` or with a single seed.
    """
    cell = spread_cell(spread, median)
    if median or spread.seeds == 1 or pd.isna(spread.published_sd):
        return cell
    population_sd = spread.sd * math.sqrt((spread.seeds - 1) / spread.seeds)  # divided by n
    return f"{cell} ({population_sd:.3f})"


def published_cell(spread: Any) -> str:
    """Format the number that a paper reports for a metric, such as "0.812 ± 0.034".

    ``spread`` is a row of ``over_seeds``. Numbers have three decimals. Without a published
    deviation, the text is only the number. Without a published number, the text is empty.
    """
    if pd.isna(spread.published):
        return ""
    cell = f"{spread.published:.3f}"
    if not pd.isna(spread.published_sd):
        cell += f" ± {spread.published_sd:.3f}"
    return cell


def comparison_table(results: pd.DataFrame, split: str = "test", median: bool = False) -> Table:
    """Build the terminal table of a comparison, with a horizontal line below each experiment.

    There is a row for each experiment and group of sites, and a column for each metric. A metric
    that a paper reports also has a column with the paper's numbers. The table's title names the
    statistics in the cells and the number of seeds.

    Args:
        results: the tidy results.
        split: the split of the samples, which the columns' titles name.
        median: whether cells show median and range, in place of mean and sample standard deviation.
    """
    seeds = results.groupby(KEY).size().max()
    shown = "mean ± sample sd"
    if median:
        shown = "median (min to max)"
    elif seeds > 1 and results["published_sd"].notna().any():
        shown += " (population sd, as published)"
    title = f"{shown} over {format_count(seeds, 'seed')}"
    lines = comparison_lines(results, split, median)
    return rich_table(title, lines, left=2, ends=lambda line: line[1] == "all")


def comparison_lines(
    results: pd.DataFrame, split: str = "test", median: bool = False
) -> list[list[str]]:
    """Format a comparison as rows of cells: the titles, then a row for each experiment and group.

    A row begins with the names of the experiment and of the group of sites. Each metric then has a
    column that summarises the values of fedsilo's runs over the seeds. If a paper reports the
    metric, the next column has the paper's numbers.

    Args:
        results: a table with one row for each experiment, group, metric and seed.
        split: the split of the samples, which the columns' titles name.
        median: whether to show median and range in place of mean and standard deviation.
    """
    spreads = over_seeds(results)
    known = spreads.loc[spreads["published"].notna(), "metric"]
    deviating = spreads.loc[spreads["published_sd"].notna(), "metric"]
    published = dict.fromkeys(known, "published")
    published |= dict.fromkeys(deviating, "published ± population sd")
    titles = {metric: f"{split} {metric}" for metric in spreads["metric"].unique()}
    lines = group_lines(spreads, titles, published, lambda row: _next_to_published(row, median))
    return [["experiment", "group", *lines[0]], *lines[1:]]


def group_lines(
    spreads: pd.DataFrame,
    titles: Mapping[str, str],
    published: Mapping[str, str],
    cell: Callable[[Any], str],
    missing: str = NONE,
) -> list[list[str]]:
    """Format the statistics of metrics over seeds as rows of cells.

    The first row has only the titles of the metrics' columns. Every other row begins with the names
    of the experiment and the group of sites, so it has two cells more. If a metric has fewer seeds
    than another metric of the experiment, the cell says so, for example "(2 of 3 seeds)".

    Args:
        spreads: rows of ``over_seeds``.
        titles: metric -> title of its column.
        published: metric -> title of the column with a paper's numbers, for metrics that a paper
            reports.
        cell: formats a row of ``spreads``.
        missing: the cell of a metric that a group lacks. The cell for the paper's number is then
            empty.
    """
    columns = []
    for metric, title in titles.items():
        columns.append(title)
        if metric in published:
            columns.append(published[metric])
    # Fewer seeds than the experiment's most mean that the metric was undefined in some run
    lines, most = [columns], spreads.groupby("experiment")["seeds"].max().to_dict()
    for (experiment, group), part in spreads.groupby(["experiment", "group"], sort=False):
        by_metric: dict[str, Any] = {}
        for spread in part.itertuples():
            by_metric[str(spread.metric)] = spread
        line = [str(experiment), str(group)]
        for metric in titles:
            found: Any = by_metric.get(metric)
            ours = missing
            if found:
                ours = cell(found)
                if found.seeds < most[experiment]:
                    ours += f" ({found.seeds} of {most[experiment]} seeds)"
            line.append(ours)
            if metric in published:
                line.append(published_cell(found) if found else "")
        lines.append(line)
    return lines


def rich_table(
    title: str,
    lines: Sequence[Sequence[str]],
    left: int = 1,
    ends: Callable[[Sequence[str]], bool] = lambda _: False,
) -> Table:
    """Build a terminal table from rows of cells. The first row has the column titles.

    Args:
        title: the text above the table.
        lines: the rows of cells, all of the same length.
        left: the number of columns that are aligned left. All others are aligned right.
        ends: tells whether a horizontal rule follows a row, given its cells.
    """
    table = Table(title=title, title_justify="left")
    columns, *body = lines
    for column in columns[:left]:
        table.add_column(column, justify="left")
    for column in columns[left:]:
        table.add_column(column, justify="right")
    for line in body:
        table.add_row(*line, end_section=ends(line))
    return table


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as a Markdown table. The first row has the column titles.

    Cells are escaped, so that they do not act as Markdown.
    """
    columns, *body = lines
    text = ""
    for line in (columns, ["---"] * len(columns), *body):
        text += f"| {' | '.join(map(markdown_cell, line))} |\n"
    return text


def seconds_text(seconds: float) -> str:
    """Format a duration in seconds: ``12.3 s``, ``4 min 05 s``, ``3 h 07 min``.

    Minutes are shown from 60 seconds, and hours from 60 minutes. With hours, seconds are cut off.
    There are no days, so the hours can exceed 24.
    """
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def csv_text(frame: pd.DataFrame) -> str:
    """Format a data frame as CSV. Floating-point numbers have six decimals.

    The columns ``published`` and ``published_sd`` are an exception: their numbers are written as
    they are. Column titles are the columns' names with spaces in place of underscores. A missing
    value is an empty cell.
    """
    texts = frame.astype(object)
    for name in frame.columns:
        text_of: Callable[[Any], str] = str
        if frame[name].dtype.kind == "f" and name not in _AS_PUBLISHED:
            text_of = "{:.6f}".format
        cells = []
        for value in frame[name]:
            cells.append("" if pd.isna(value) else text_of(value))
        texts[name] = cells
    titles = [name.replace("_", " ") for name in frame.columns]
    return texts.to_csv(index=False, header=titles, lineterminator="\n")


def json_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Convert a table to a list of dictionaries for JSON, one per row: column -> value.

    A missing value becomes None. Floating-point numbers are rounded to 15 decimals.
    """
    # pandas rounds to ten decimals by default; 15 is the most that it allows
    records: list[dict[str, Any]] = json.loads(frame.to_json(orient="records", double_precision=15))
    return records


_LEGEND_COLUMNS = 3
_WIDTH = 0.84  # width of all bars at a site together; the distance between sites is 1


def draw_comparison(results: pd.DataFrame, split: str) -> Figure:
    """Draw the results of experiments as bars, with one panel for each metric.

    At each group of sites, a panel has a bar for each experiment: the mean over seeds, with the
    sample standard deviation as error bar.

    Args:
        results: a tidy table, with the columns ``TIDY``.
        split: the split of the samples, for the title.
    """
    spreads = over_seeds(results)
    metrics = list(spreads["metric"].unique())
    experiments = list(spreads["experiment"].unique())
    groups = list(spreads["group"].unique())
    # Inches: room for the bars of each group, and at least for its name
    width = 1.2 + len(groups) * max(0.6, 0.17 * len(experiments) + 0.2)
    figure = new_figure(max(5.0, width), 0.9 + 2.0 * len(metrics))
    panels = figure.subplots(len(metrics), 1, squeeze=False, sharex=True)[:, 0]
    for axes, metric in zip(panels, metrics, strict=True):
        _draw_panel(axes, spreads[spreads["metric"] == metric], groups, colours(experiments))
        axes.set_ylabel(curve_label(metric))
    panels[-1].set_xticks(range(len(groups)), groups)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=_LEGEND_COLUMNS, fontsize="small"
    )
    figure.suptitle(f"{split} samples, mean and sd over seeds", fontsize="medium")
    return figure


def _draw_panel(
    axes: Axes, spreads: pd.DataFrame, groups: Sequence[str], coloured: Mapping[str, str]
) -> None:
    """Draw one metric into a panel, with a bar for each experiment at each group of sites.

    A bar is the mean over seeds, with the sample standard deviation as error bar. An experiment
    with only one seed has no error bars.

    Args:
        axes: the panel.
        spreads: the metric's rows in the table of ``over_seeds``.
        groups: the groups in the order of the horizontal axis.
        coloured: experiment -> its colour, in the order of the bars.
    """
    each = _WIDTH / len(coloured)
    for number, (name, colour) in enumerate(coloured.items()):
        here = spreads[spreads["experiment"] == name].set_index("group").reindex(list(groups))
        # A deviation needs more than one seed
        errors = here["sd"].tolist() if (here["seeds"] > 1).any() else None
        # The bars of a group stand side by side, centred on the group's tick
        left = -_WIDTH / 2 + (number + 0.5) * each
        axes.bar(
            np.arange(len(groups)) + left,
            here["mean"].tolist(),
            each,
            yerr=errors,
            error_kw={"elinewidth": 0.8, "capsize": 1.5},
            label=name,
            color=colour,
            edgecolor="white",
            linewidth=0.5,
        )
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
