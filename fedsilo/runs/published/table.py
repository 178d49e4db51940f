"""Prints the papers' numbers next to those of a finished run, for the command that ran it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fedsilo.runs.published.published_numbers import Numbers, Published
from fedsilo.server_app.records.summary import NONE
from fedsilo.server_app.run.terminal import print_table, printer


def print_published(
    summary: Mapping[str, Any], published: Published, headline: Sequence[str], console: Console
) -> None:
    """Print a run's numbers next to those of a paper, or the reason why the paper has no numbers.

    Nothing is printed if no paper has the run's method on the run's data.

    Args:
        summary: the content of ``summary.json``.
        published: the paper's numbers for the run. If there are none, it describes how the paper's
            setting differs.
        headline: the metrics of the run's data set to show, in this order.
        console: where to print.
    """
    say = printer(console)
    if published.numbers:
        print_table(console, published_table(summary, published.numbers, headline))
        say("published: the numbers from the paper, measured in the paper's own setting")
    elif published.unlike:
        say(f"no published numbers, because the paper measured another setting: {published.unlike}")


def published_table(summary: Mapping[str, Any], numbers: Numbers, headline: Sequence[str]) -> Table:
    """Build a table that compares a run's test metrics with a paper's numbers.

    There is a row for each part (site, distribution or "all") that both the run and the paper have,
    in the order of ``numbers``. Each metric has a column for the run and one for the paper. Metrics
    that the paper never prints are left out. A number that the run lacks is "n/a", and a number
    that the paper lacks is an empty cell.

    Args:
        summary: the content of ``summary.json``.
        numbers: the paper's numbers: part -> metric -> number.
        headline: metrics in the order of the columns.
    """
    measured = {**summary["distributions"], **summary["sites"], "all": summary["mean"]}
    printed: set[str] = set()
    printed.update(*numbers.values())
    metrics = [metric for metric in headline if metric in printed]
    table = Table(title="Next to the paper", title_justify="left")
    table.add_column("site")
    for metric in metrics:
        table.add_column(f"test {metric}", justify="right")
        table.add_column(f"published {metric}", justify="right")
    for name, row in numbers.items():
        if name not in measured:
            continue
        cells = []
        for metric in metrics:
            cells += [_cell(measured[name], metric) or NONE, _cell(row, metric)]
        style = ""
        if name == "all":
            style = "bold"
        table.add_row(name, *cells, style=style)
    return table


def _cell(row: Mapping[str, float], metric: str) -> str:
    """Format a metric of ``row`` with three decimals. If it is missing, return an empty string."""
    if metric not in row:
        return ""
    return f"{row[metric]:.3f}"
