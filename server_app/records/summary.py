"""Summarises a run: means, the table of results, and the data that left the sites."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from fedsilo.core import one_line
from fedsilo.core.settings.common_settings import NOBODY, SERVER, SUMS
from fedsilo.models.tasks.task import Task

Values = Mapping[str, Mapping[str, float]]

NONE = "n/a"
MANY = 20  # more sites than this are summarised
_WORST = 5  # sites that a summary still names

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
NO_PRIVACY = "no differential-privacy guarantee"
ALWAYS_LEAVES = (
    "at the start: the site's name, the shape of its inputs, the names of the classes, for tables "
    "the features' names, a SHA-256 of the schema, the site's 'sums-min-count', the "
    "SHA-256 of the weights file that the network starts from, versions and revision of fedsilo, "
    "Flower and PyTorch, and the device",
    "when something fails: the error's text, which names files, lines and columns, no values",
)
_BY_TRUST: Mapping[str, Sequence[str]] = {
    SERVER: (
        "at the start: its label counts per class and split, how many samples were left out, and "
        "a SHA-256 of each split",
        "with each reply: the number of training samples, seconds, peak memory, optimiser steps "
        "and the samples that they saw, and measurements "
        "on training, validation and test data ({measured}); with few samples, these and the "
        "label counts reveal each sample's",
        "at the end, with enough test samples: {counted}",
    ),
    SUMS: (
        "at the start: which of its splits it measures",
        "with each reply: masked numbers, of which the server learns sums over at least "
        "'secure.threshold' sites: samples of each split that all sites measure, and {always} "
        "on them; whether it keeps private state, and which operations were not "
        "repeatable. Nothing else that it measures leaves, nor label counts, seconds and memory",
    ),
    NOBODY: (
        "at the start: its label counts per class and split, with noise",
        "with each reply: {noisy} of the model received, with noise",
    ),
}
COUNTED = "with each reply: the epsilon that the site has spent in this run"


def leaves_by_trust(trust: str, task: Task) -> list[str]:
    """Return privacy.json's sentences on the data that leave a site at a level of trust.

    These sentences hold for every method. A method adds its own sentences.

    Args:
        trust: the run's level of trust: "server", "sums" or "nobody".
        task: the run's task, which gives the names of metrics for the sentences.
    """
    return [sentence.format(**task_words(task)) for sentence in _BY_TRUST[trust]]


def task_words(task: Task) -> dict[str, str]:
    """Return the phrases of a task that fill the placeholders in privacy.json's sentences.

    The sentences say which data leave a site. The keys are the placeholders:

    - "measured" and "counted": the task's own phrases for what a site measures and counts at trust
      'server', such as "R2 and loss",
    - "always": the names of the metrics that a site sends at trust 'sums', such as "accuracy and
      loss",
    - "noisy": the names of the metrics that a site sends with noise at trust 'nobody'. If there are
      none, the phrase is "no measurement".
    """
    return {
        "measured": task.measured_words,
        "counted": task.counted_words,
        "always": _and(task.always),
        "noisy": _and([*task.part_ranges(2)] or ["no measurement"]),
    }


def _and(names: Sequence[str]) -> str:
    """Join names by commas and "and"."""
    *first, last = names
    if not first:
        return last
    return f"{', '.join(first)} and {last}"


def means(values: Values) -> dict[str, float]:
    """Return the unweighted mean of each metric over the sites that reported the metric.

    A site may lack a metric. It has no AUC, for example, if its labels have only one class. If no
    site reported any metric, the result is empty.
    """
    values_of: dict[str, list[float]] = {}
    for site in values.values():
        for metric, value in site.items():
            values_of.setdefault(metric, []).append(value)
    found = {}
    for metric, listed in values_of.items():
        found[metric] = sum(listed) / len(listed)
    return found


def by_distribution(
    values: Values, distribution_of: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Compute the means of each group of similar sites: distribution -> metric -> mean.

    Such a group is called a distribution. The result is sorted by distribution. Each mean is
    unweighted, over those sites of the group that have the metric. A name that is not in
    ``distribution_of``, such as "all", is left out.

    Args:
        values: site -> metric -> value.
        distribution_of: site -> the name of its distribution.
    """
    sites_of: dict[str, dict[str, Mapping[str, float]]] = {}
    for site, row in values.items():
        if site in distribution_of:
            sites_of.setdefault(distribution_of[site], {})[site] = row
    return {name: means(rows) for name, rows in sorted(sites_of.items())}


def privacy_document(
    method: str,
    trust: str,
    task: Task,
    leaves: Sequence[str],
    totals: Mapping[str, int],
    guarantee: str | Mapping[str, Any] = NO_PRIVACY,
    perturbation: str = "",
) -> dict[str, Any]:
    """Build privacy.json: the data that left the sites, the bytes, and the privacy guarantee.

    Args:
        method: the method's name.
        trust: the run's level of trust: "server", "sums" or "nobody".
        task: the run's task.
        leaves: the method's own sentences on the data that leave a site.
        totals: the total bytes, "down" and "up". Only "up" is used.
        guarantee: a mapping with the guarantee of differential privacy, or a sentence that there is
            none.
        perturbation: a description of noise that gives no privacy guarantee, or empty.

    Returns:
        A mapping with these keys:

        - "method" and "bytes up",
        - "trust": the level and its promise,
        - "leaves each site": the sentences for all runs, those for the level of trust, and then
          ``leaves``. With differential privacy, a last sentence says that replies state the
          epsilon,
        - "guarantee", and "epsilon": the epsilon of the guarantee, or "none",
        - "perturbation": only if ``perturbation`` is not empty.
    """
    # The package of the ClientApp brings Flower, which commands that only list do not need
    from fedsilo.client_app.site.trust import MEANINGS

    sentences = [*ALWAYS_LEAVES, *leaves_by_trust(trust, task), *leaves]
    epsilon = "none"
    # Each reply of a run with differential privacy states the epsilon that the site has spent
    if not isinstance(guarantee, str):
        sentences.append(COUNTED)
        epsilon = guarantee["epsilon"]
    document = {
        "method": method,
        "trust": {"level": trust, "promise": MEANINGS[trust]},
        "leaves each site": sentences,
        "bytes up": totals["up"],
        "guarantee": guarantee,
        "epsilon": epsilon,
    }
    if perturbation:
        document["perturbation"] = perturbation
    return document


def result_table(
    values: Values,
    distribution_of: Mapping[str, str],
    title: str,
    shown: Sequence[str],
    hidden: Collection[str] = (),
) -> Table:
    """Build the table of test results: a row per site, per distribution and for all sites.

    A distribution is a group of sites. A site with the same name as its distribution gets no row,
    because its values are in the distribution's row. More than 20 sites are replaced by rows of
    each metric's quantiles and by the five sites with the lowest values of the first metric. More
    than 20 distributions get no rows. Rows of distributions and of all sites are unweighted means.

    Args:
        values: site -> metric -> value on the test samples.
        distribution_of: site -> its distribution.
        title: the title of the table.
        shown: the metrics to show, in this order. A metric that no site has is left out.
        hidden: metrics that must not be shown for some sites. Those in ``shown`` get a column even
            if no site has a value.
    """
    known: set[str] = set()
    for row in values.values():
        known.update(row)
    metrics = [metric for metric in shown if metric in known or metric in hidden]
    measured = [metric for metric in metrics if metric in known]
    table = Table(title=title, title_justify="left")
    table.add_column("site")
    for metric in metrics:
        table.add_column(f"test {metric}", justify="right")
    groups = by_distribution(values, distribution_of)
    if len(groups) > MANY:
        groups = {}
    for name, row in _select_rows(values, measured).items():
        group = distribution_of.get(name, "")
        # The row of the distribution below would repeat its only site
        if name in groups and group == name:
            continue
        label = name
        if group in groups:
            label = f"{name} ({group})"
        table.add_row(label, *_format_cells(row, metrics))
    table.add_section()
    for name, row in [*groups.items(), ("all", means(values))]:
        table.add_row(name, *_format_cells(row, metrics), style="bold")
    return table


def summary_lines(
    summary: Mapping[str, Any], silos: Mapping[str, Any], shown: Sequence[str]
) -> Iterator[Table | str]:
    """Yield the test results of a finished run, to be printed.

    The results are one table. At trust 'sums', ``summary`` has no results of single sites. Two
    lines are yielded instead: a title, and the means over sites.

    Args:
        summary: the content of summary.json, possibly without values that must stay hidden.
        silos: the content of silos.json.
        shown: the metrics in the table, in this order. The line of means has all metrics.
    """
    title = title_of_results(summary)
    if not summary["sites"]:
        yield title
        yield mean_line(summary["mean"])
        return
    distribution_of = {}
    for site, facts in silos.items():
        distribution_of[site] = str(facts["distribution"])
    yield result_table(summary["sites"], distribution_of, title, shown)


def title_of_results(summary: Mapping[str, Any]) -> str:
    """Build the title of the final table: the method, the data set, the round and the seed."""
    what = f"{summary['title']} on {summary['dataset']}"
    return f"{what}, round {summary['rounds']}, seed {summary['seed']}"


def mean_line(mean: Mapping[str, float]) -> str:
    """Format the means over all sites as one line, with three decimals, sorted by metric.

    An example is "mean over the test samples of all sites: accuracy 0.812, loss 0.431". If there
    are no means, "none" stands after the colon.
    """
    values = ", ".join(f"{metric} {value:.3f}" for metric, value in sorted(mean.items()))
    return f"mean over the test samples of all sites: {values or 'none'}"


def _select_rows(values: Values, metrics: Sequence[str]) -> Values:
    """Select the rows to show: all sites or, if there are many, quantiles and the five worst sites.

    More than 20 sites are many. Quantiles of 5, 25, 50, 75 and 95 % are computed for each metric
    separately, in rows such as "5% of 40 sites below". The worst sites have the lowest values of
    the first metric, even if low is good. If ``metrics`` is empty, all sites are returned.

    Args:
        values: site -> metric -> value.
        metrics: the metrics of the table, in order. For each, at least one site must have a value.
    """
    if len(values) <= MANY or not metrics:
        return values
    rows: dict[str, Mapping[str, float]] = {}
    # Each metric has its own quantiles, so such a row is not one site
    for share in _QUANTILES:
        quantiles = {}
        for metric in metrics:
            numbers = [row[metric] for row in values.values() if metric in row]
            quantiles[metric] = float(np.quantile(numbers, share))
        rows[f"{share:.0%} of {len(values)} sites below"] = quantiles
    first = metrics[0]
    of_first = {site: row[first] for site, row in values.items() if first in row}
    for site in worst(of_first):
        rows[site] = values[site]
    return rows


def _format_cells(row: Mapping[str, float], metrics: Sequence[str]) -> list[str]:
    """Format one row's metrics as the cells of the result table.

    Perplexity has one decimal, and all other metrics have three. A metric that the row lacks is
    "n/a".
    """
    cells = []
    for metric in metrics:
        digits = 3
        if metric == "perplexity":
            digits = 1
        text = NONE
        if metric in row:
            text = f"{row[metric]:.{digits}f}"
        cells.append(text)
    return cells


# --- Runs of more sites than a table or a picture can show one by one ---


def worst(values: Mapping[str, float], *, high_is_worse: bool = False) -> list[str]:
    """Return the five names with the lowest values, lowest first, or all names if there are fewer.

    Names with equal values are in alphabetical order.

    Args:
        values: name -> value.
        high_is_worse: whether to return the names with the highest values instead, highest first.
            The whole order is then reversed, so equal values are in reverse alphabetical order.
    """
    # The name is in the key too, so that equal values give one order on every machine
    return sorted(values, key=lambda name: (values[name], name), reverse=high_is_worse)[:_WORST]


def join_names(names: Sequence[str]) -> str:
    """Join names with commas. If there are more than 20, name the first five and count the rest."""
    most = MANY
    if len(names) > MANY:
        most = _WORST
    return one_line.join_names(names, most)
