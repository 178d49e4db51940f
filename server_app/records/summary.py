"""The end of a run: summary.json, privacy.json, the final model, and the table on the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedsilo.server_app.records.many_sites import MANY, worst

Values = Mapping[str, Mapping[str, float]]

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
NO_PRIVACY = "no differential-privacy guarantee"
ALWAYS_LEAVES = (
    "at the start: the site's name, its label counts per class and split, the shape of its inputs, "
    "the names of the classes, for tables the features' names, a SHA-256 of the schema, how many "
    "samples were left out, the site's 'sums-min-count', the SHA-256 of the weights file that the "
    "network starts from, a SHA-256 of each split, versions and revision of fedsilo, Flower and "
    "PyTorch, and the device",
    "with each reply: the number of training samples, measurements (accuracy, balanced accuracy, "
    "AUC, average precision, calibration error, loss, entropy and the method's own) on training, "
    "validation and test data, seconds, peak memory; of few samples these and the label counts "
    "tell of each of them; "
    "of an evidential network also mean vacuity; of enough test samples at the end also how many "
    "fall into each tenth of confidence and of uncertainty, of an evidential network of vacuity, "
    "how many of those are right, their mean, and by class how many are found, how many others "
    "are taken for it, and its AUC",
    "when something fails: the error's text, which names files, lines and columns, no values",
)
COUNTED = "with each reply: how many noisy messages the site has made in this run"


def means(values: Values) -> dict[str, float]:
    """Return the unweighted mean of every metric over the sites that have it.

    A site whose labels leave a metric undefined (AUC of one class) is no part of its mean.
    """
    metrics = dict.fromkeys(metric for site in values.values() for metric in site)
    values_of = {
        metric: [site[metric] for site in values.values() if metric in site] for metric in metrics
    }
    return {metric: sum(listed) / len(listed) for metric, listed in values_of.items()}


def by_distribution(
    values: Values, distribution_of: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Return the means (mA, mE, mP: eq. 10) over the sites of each distribution."""
    names = sorted({distribution_of[site] for site in values})
    return {
        name: means({site: row for site, row in values.items() if distribution_of[site] == name})
        for name in names
    }


def privacy_document(
    method: str,
    leaves: Sequence[str],
    totals: Mapping[str, int],
    guarantee: str | Mapping[str, Any] = NO_PRIVACY,
    perturbation: str = "",
) -> dict[str, Any]:
    """Return privacy.json: what left the sites, how much, and what is guaranteed.

    Args:
        method: the method's name.
        leaves: what it makes leave, in words.
        totals: bytes ``up`` and ``down``.
        guarantee: ``NO_PRIVACY``, or what differential privacy guarantees.
        perturbation: noise of the method that guarantees nothing, in words; empty: none.
    """
    private = not isinstance(guarantee, str)
    document = {
        "method": method,
        "leaves each site": [*ALWAYS_LEAVES, *leaves, *([COUNTED] if private else [])],
        "bytes up": totals["up"],
        "guarantee": guarantee,
        "epsilon": "none" if isinstance(guarantee, str) else guarantee["epsilon"],
    }
    return document | ({"perturbation": perturbation} if perturbation else {})


def result_table(
    values: Values,
    distribution_of: Mapping[str, str],
    title: str,
    published: Values | None,
    shown: Sequence[str],
) -> Table:
    """Return the final table: a row per site, per distribution and for all, with the paper's.

    Sites that are a distribution each have no second row. Of more than twenty sites quantiles and
    the worst five are shown.
    """
    metrics = [metric for metric in shown if any(metric in row for row in values.values())]
    # A paper may print fewer metrics than a run has: no column stands empty
    compared = [
        metric
        for metric in metrics
        if published and any(metric in row for row in published.values())
    ]
    table = Table(title=title, title_justify="left")
    table.add_column("site")
    for metric in metrics:
        table.add_column(f"test {metric}", justify="right")
    for metric in compared:
        table.add_column(f"published {metric}", justify="right")
    groups = by_distribution(values, distribution_of)
    groups = groups if len(groups) <= MANY else {}
    for name, row in _shown_sites(values, metrics).items():
        group = distribution_of.get(name, "")
        if group != name or name not in groups:
            table.add_row(
                escape(f"{name} ({group})" if group in groups else name),
                *_cells(row, metrics),
                *_cells((published or {}).get(name, {}), compared),
            )
    table.add_section()
    for name, row in [*groups.items(), ("all", means(values))]:
        paper = (published or {}).get(name, {})
        table.add_row(escape(name), *_cells(row, metrics), *_cells(paper, compared), style="bold")
    return table


def _shown_sites(values: Values, metrics: Sequence[str]) -> Values:
    """Return the rows of sites; of many, quantiles of each metric and the five worst by the first.

    The first of a data set's metrics is one of which more is better.
    """
    if len(values) <= MANY or not metrics:
        return values
    found = {m: [row[m] for row in values.values() if m in row] for m in metrics}
    quantiles = {
        f"{share:.0%} of {len(values)} sites below": {
            metric: float(np.quantile(numbers, share)) for metric, numbers in found.items()
        }
        for share in _QUANTILES
    }
    first = {site: row[metrics[0]] for site, row in values.items() if metrics[0] in row}
    return quantiles | {site: values[site] for site in worst(first)}


def _cells(row: Mapping[str, float], metrics: Sequence[str]) -> list[str]:
    return [
        ""
        if metric not in row
        else f"{row[metric]:.1f}"
        if metric == "perplexity"
        else f"{row[metric]:.3f}"
        for metric in metrics
    ]


def print_table(console: Console, table: Table) -> None:
    """Print a table as wide as it needs to be."""
    console.print(table, soft_wrap=not console.is_terminal)
