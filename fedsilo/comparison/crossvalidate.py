"""``fedsilo crossvalidate``: repeated stratified cross-validation over each site's rows.

Every experiment runs on the same splits, so that methods are compared run by run. Each experiment
is compared with the first one.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from rich.table import Table

from fedsilo.comparison.budgets import MARK, Budgets
from fedsilo.comparison.results import POOLED
from fedsilo.comparison.slurm import Jobs
from fedsilo.comparison.tables import csv_text, json_records, markdown_table, p_equation, rich_table
from fedsilo.comparison.trials import Trial, run_groups, trial_settings
from fedsilo.core.errors import SettingError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.metric_names import metric_range
from fedsilo.datasets.registry import data_fingerprint, data_set
from fedsilo.server_app.config.settings import RunSettings

COLUMNS = ("experiment", "compared_with", "group", "metric", "mean", "low", "high", "p", "runs")

Summaries = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class CrossValidation:
    """The result of a cross-validation.

    ``intervals`` has the columns ``COLUMNS``: first the metrics of each experiment, then the
    differences, whose ``compared_with`` names the subtracted experiment. ``budgets`` has the budget
    of each experiment, with the finished rounds.
    """

    intervals: pd.DataFrame
    metrics: Sequence[str]
    budgets: Budgets = field(default_factory=Budgets)

    def document(self) -> dict[str, Any]:
        """Return the intervals and the budgets as a dictionary for JSON."""
        return {"intervals": json_records(self.intervals), "budgets": self.budgets.lines()}

    def lines(self) -> Iterator[Table | str]:
        """Describe the result for the terminal.

        Yields:
            A table for each metric, in which experiments with unequal budgets are marked; then a
            remark for each of these experiments.
        """
        marked = self.budgets.mark_unequal(self.intervals)
        for metric in self.metrics:
            yield metric_table(marked, metric)
        for remark in self.budgets.remarks():
            yield f"{MARK.strip()} {remark}"

    def write(self, csv: Path | None, markdown: Path | None) -> None:
        """Write the intervals to the CSV file ``csv``, and the tables to the file ``markdown``.

        A path that is None is skipped. Existing files are replaced. The Markdown tables mark
        experiments with unequal budgets, and a remark below the tables explains each mark.
        """
        if csv:
            write_atomically(csv, csv_text(self.intervals))
        if markdown:
            text = markdown_text(self.budgets.mark_unequal(self.intervals), self.metrics)
            for remark in self.budgets.remarks():
                text += f"\n{MARK.strip()} {remark}\n"
            write_atomically(markdown, text)


def plan_folds(
    plans: Mapping[str, RunSettings], folds: int, repeats: int
) -> Mapping[str, Sequence[Trial]]:
    """Plan the runs of a cross-validation of several experiments.

    In each repetition, the rows are shuffled anew and cut into folds. Each fold is the test set of
    one run. An experiment therefore has ``folds`` times ``repeats`` runs. Nothing is run here.

    Args:
        plans: the name of each experiment -> its settings.
        folds: the number of folds.
        repeats: the number of repetitions.

    Returns:
        Experiment -> its planned runs (trials). All experiments have the same order of repetitions
        and folds.

    Raises:
        SettingError: a data set comes with its own split, so it cannot be cut into folds. Also
            raised if the experiments use different data.
    """
    trials = {}
    for name, settings in plans.items():
        trials[name] = _trials(settings, folds, repeats)
    _refuse_other_data(plans)
    return trials


def run_folds(
    trials: Mapping[str, Sequence[Trial]], out: Path, jobs: Jobs
) -> Mapping[str, Summaries]:
    """Run the planned runs (trials) of all experiments, and return their summaries.

    A summary has the metrics of a finished run, and is kept as a file. A trial that has such a file
    from an earlier call is not run again.

    Args:
        trials: experiment -> its trials.
        out: the folder of runs. Summaries are written to its folder ``crossvalidation``.
        jobs: the number of runs at once, or 0 for one per core. For runs on a cluster, the
            parameters of Slurm.

    Returns:
        Experiment -> the summaries of its runs, in the order of its trials.

    Raises:
        RunFailedError: a run failed. The summaries of the runs before it are kept.
    """
    found = run_groups(list(trials.values()), out / "crossvalidation", jobs)
    return dict(zip(trials, found, strict=True))


def compare_folds(
    summaries: Mapping[str, Summaries], headline: Sequence[str], folds: int, budgets: Budgets
) -> CrossValidation:
    """Compute intervals of all metrics, and of the differences from the first experiment.

    Args:
        summaries: experiment -> the summaries of its runs. The k-th runs of all experiments must
            have the same split of the data.
        headline: the metrics to compare. "pooled-balanced-accuracy", the balanced accuracy over the
            samples of all sites, is added only if every run has it.
        folds: the number of folds. The fewer there are, the more the intervals are widened, because
            runs share training rows.
        budgets: the budget of each experiment.
    """
    metrics = list(headline)
    # Only if no run lacks it, because its column has a value for every run
    if all(POOLED in run["mean"] for run in chain(*summaries.values())):
        metrics.append(POOLED)
    means = metric_intervals(summaries, metrics, folds)
    differences = difference_intervals(summaries, metrics, folds)
    return CrossValidation(pd.concat([means, differences]), metrics, budgets)


def _refuse_other_data(plans: Mapping[str, RunSettings]) -> None:
    """Check that all experiments use the data set and the data folder of the first one.

    Raises:
        SettingError: an experiment uses another data set or folder.
    """
    first, *_ = plans
    common = plans[first].common
    for name, settings in plans.items():
        if (settings.common.dataset, settings.common.data_dir) != (common.dataset, common.data_dir):
            raise SettingError(
                f"experiment '{name}' uses other data than '{first}', but methods are compared on "
                "the same splits: name experiments on one data set"
            )


def _trials(settings: RunSettings, folds: int, repeats: int) -> list[Trial]:
    """Plan the runs of an experiment's cross-validation.

    In each run, one fold is the test set. All folds of the first repetition come first, then those
    of the second, and so on. The number of a repetition, from 0, is the seed of its runs and
    decides how rows are shuffled into folds.

    Args:
        settings: the settings of the experiment.
        folds: the number of folds.
        repeats: the number of repetitions.

    Raises:
        SettingError: the data set has a fixed split, so it cannot be cut into folds.
    """
    base, data = settings.as_mapping(), data_fingerprint(settings.common)
    if "split.test-folds" not in data_set(str(base["dataset"])).settings:
        raise SettingError(
            f"data set '{base['dataset']}' has a fixed split, so it cannot be cut into folds: use "
            "'fedsilo compare' with several seeds"
        )
    trials = []
    # The folds of a repetition share its shuffling and its seed, so that each row is tested once
    for repeat, fold in product(range(repeats), range(folds)):
        cut = {
            "split.test-folds": folds,
            "split.test-fold": fold,
            "split.fold-seed": repeat,
            "seed": repeat,
        }
        trials.append(
            Trial(trial_settings({**base, **cut}), {"repeat": repeat, "fold": fold}, data)
        )
    return trials


def metric_intervals(
    summaries: Mapping[str, Summaries], metrics: Sequence[str], folds: int
) -> pd.DataFrame:
    """Compute the interval of each experiment's metrics, for each site and for the mean over sites.

    The intervals are 95 % corrected resampled t intervals over the runs, clipped to the range of
    the metric. A metric may be undefined at a site in some runs, such as AUC with one class. Then
    the site's interval is over its other runs, and the site is left out of the mean over sites in
    all experiments. The metric "pooled-balanced-accuracy" has a single interval.

    Args:
        summaries: experiment -> the summaries of its runs.
        metrics: the names of the metrics.
        folds: the number of folds. The fewer there are, the wider are the corrected intervals.

    Returns:
        A table with the columns ``experiment``, ``compared_with`` (always empty), ``group``,
        ``metric``, ``mean``, ``low``, ``high``, ``p`` and ``runs``. ``group`` is a site's name, or
        "all" for the mean over sites and for the pooled metric. ``p`` is the p value of the test
        that the mean is 0. ``low``, ``high`` and ``p`` are NaN for a single run.
    """
    records = []
    for name, metric in product(summaries, metrics):
        by_group = _by_group(summaries[name], metric, _complete_sites(summaries, metric))
        for group, interval in _intervals(by_group, folds):
            # A t interval may exceed the range of its metric
            records.append((name, "", group, metric, interval.within(*_range_of(metric))))
    return interval_frame(records)


def _range_of(metric: str) -> tuple[float, float]:
    """Return the smallest and largest possible value of a metric."""
    if metric == POOLED:  # a share, which is computed here and which no site measures
        return 0.0, 1.0
    return metric_range(metric)


def difference_intervals(
    summaries: Mapping[str, Summaries], metrics: Sequence[str], folds: int
) -> pd.DataFrame:
    """Compute the intervals of the first experiment's metrics minus each other experiment's.

    Values are subtracted run by run, because the k-th runs of all experiments have the same split.
    Each 95 % corrected resampled t interval has the p value for a true difference of 0. A site's
    interval is over the runs in which both experiments have the metric. Another interval is for the
    mean over the sites that have the metric in every run of every experiment.

    Args:
        summaries: experiment -> the summaries of its runs.
        metrics: the names of the metrics.
        folds: the number of folds. The fewer there are, the wider are the corrected intervals.

    Returns:
        A table with the columns ``experiment``, ``compared_with`` (the subtracted experiment),
        ``group``, ``metric``, ``mean``, ``low``, ``high``, ``p`` and ``runs``.
    """
    first, *others = summaries
    records = []
    for other, metric in product(others, metrics):
        complete = _complete_sites(summaries, metric)
        mine = _by_group(summaries[first], metric, complete)
        theirs = _by_group(summaries[other], metric, complete)
        # Without reindexing, pandas would sort the columns if they differ
        differences = mine - theirs.reindex(columns=mine.columns)
        for group, interval in _intervals(differences, folds):
            records.append((first, other, group, metric, interval))
    return interval_frame(records)


def _intervals(by_group: pd.DataFrame, folds: int) -> Iterator[tuple[str, CorrectedInterval]]:
    """Yield the name of each column and the interval of the column's mean over runs.

    Missing values are left out, and a column without any value is skipped.

    Args:
        by_group: a metric's values or differences. It has a row per run and a column per site. A
            column ``all``, if there is one, has the mean over sites.
        folds: the number of folds. The fewer there are, the wider is the corrected interval.
    """
    for group, values in by_group.items():
        # Runs without the metric at this site do not count
        known = values.dropna().tolist()
        if known:
            yield str(group), corrected_interval(known, folds)


def interval_frame(records: Iterable[tuple[str, str, str, str, CorrectedInterval]]) -> pd.DataFrame:
    """Build a data frame from intervals, with a row for each record.

    A record is (experiment, compared_with, group, metric, interval). The columns are the first four
    of these, then the interval's ``mean``, ``low``, ``high``, ``p`` and ``runs``. For an interval
    of a single run, ``low``, ``high`` and ``p`` are NaN.
    """
    rows = []
    for experiment, compared_with, group, metric, interval in records:
        rows.append((experiment, compared_with, group, metric, *interval))
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.astype(dict.fromkeys(("mean", "low", "high", "p"), float) | {"runs": int})


def _complete_sites(summaries: Mapping[str, Summaries], metric: str) -> list[str]:
    """Return the sites that have a metric in every run of every experiment, in alphabetical order.

    A site lacks a metric if no value was measured or the value is undefined (NaN).
    """
    runs = [run for of_experiment in summaries.values() for run in of_experiment]
    complete = []
    for site in sorted({site for run in runs for site in run["sites"]}):
        values = [run["sites"].get(site, {}).get(metric) for run in runs]
        if all(value is not None and not math.isnan(value) for value in values):
            complete.append(site)
    return complete


def _by_group(runs: Summaries, metric: str, complete: Sequence[str]) -> pd.DataFrame:
    """Arrange one metric as a data frame: a row per run, a column per site, and the column ``all``.

    Sites are in alphabetical order. ``all`` is the mean over the sites in ``complete``, and NaN if
    there are none. The metric "pooled-balanced-accuracy" has only the column ``all``, because no
    single site has it. An undefined value is NaN.

    Args:
        runs: the summaries of an experiment's runs.
        metric: the metric's name.
        complete: the sites that have the metric in every run of every compared experiment.
    """
    if metric == POOLED:
        return pd.DataFrame({"all": [summary["mean"][POOLED] for summary in runs]})
    names: set[str] = set()
    for run in runs:
        names |= run["sites"].keys()
    sites = sorted(names)
    rows = []
    for run in runs:
        rows.append([run["sites"].get(site, {}).get(metric) for site in sites])
    values = pd.DataFrame(rows, columns=sites, dtype=float)
    means = []
    for of_run in values[list(complete)].to_numpy().tolist():
        mean = math.nan
        if of_run:
            mean = sum(of_run) / len(of_run)
        means.append(mean)
    return values.assign(all=means)


def metric_table(intervals: pd.DataFrame, metric: str) -> Table:
    """Build the terminal table of one metric, with a column for each site and one for the mean.

    The mean is over sites. The table has a row for each experiment, then a row for each difference
    between the first experiment and another one. A cell has the mean, below it the 95 % interval,
    and for a difference the p value. If some runs lack the metric, the number of runs follows.
    """
    narrow = []
    for line in _lines(intervals, metric):
        # Mean, interval, p value and number of runs stand below each other
        narrow.append([re.sub(r" (?=\[|p [=<]|\(\d+ runs\))", "\n", cell) for cell in line])
    return rich_table(f"test {metric}: {_explain(intervals, metric)}", narrow, ends=lambda _: True)


def _explain(intervals: pd.DataFrame, metric: str) -> str:
    """Build the phrase in the heading of a metric's table that explains the cells.

    The phrase says that a cell is a mean with its 95 % interval. The column 'all' leaves out each
    site at which some run of any experiment lacks the metric. If there are such sites, the phrase
    names them. For the pooled metric, whose table has only the column 'all', no site is named.
    """
    text = "mean and 95 % interval"
    if metric == POOLED:
        return text
    single = intervals[(intervals["compared_with"] == "") & (intervals["group"] != "all")]
    partial = []
    for site, rows in single.groupby("group", sort=False):
        of_metric = rows.loc[rows["metric"] == metric, "runs"]
        # 'all' has only sites with the metric in every run of every experiment
        everywhere = len(of_metric) == rows["experiment"].nunique()
        if not everywhere or of_metric.min() < intervals["runs"].max():
            partial.append(str(site))
    if partial:
        count = single["group"].nunique()
        text += f"; 'all' is over {count - len(partial)} of {count} sites"
        text += f", without {', '.join(partial)}"
    return text


def _lines(intervals: pd.DataFrame, metric: str) -> list[list[str]]:
    """Format the intervals of one metric as rows of cells. The first row has the column titles.

    Every other row is an experiment, or the difference between the first experiment and another
    one. A column is a site, or ``all``. The cell of a group that lacks the metric is empty.
    """
    chosen = intervals[intervals["metric"] == metric]
    groups = list(chosen.loc[chosen["compared_with"] == "", "group"].unique())
    most = intervals["runs"].max()
    cells: dict[str, dict[str, str]] = {}
    for interval in chosen.itertuples():
        label = str(interval.experiment)
        if interval.compared_with:
            label = f"{label} - {interval.compared_with!s}"
        cells.setdefault(label, {})[str(interval.group)] = _cell(interval, most)
    lines = [["experiment", *groups]]
    for label, row in cells.items():
        lines.append([label, *(row.get(group, "") for group in groups)])
    return lines


def _cell(interval: Any, most: int) -> str:
    """Format a row of the intervals as a cell, such as "0.812 [0.790, 0.834]".

    The numbers are the mean and the limits of its interval. For a difference, they have signs, and
    the p value follows. If the row has fewer runs than ``most``, the largest number in the table,
    the cell ends in "(4 runs)". For a single run, it is only the mean and "(1 run)".
    """
    number = ".3f"
    if interval.compared_with:  # a difference, which has a sign and is tested
        number = "+.3f"
    cell = f"{interval.mean:{number}}"
    if pd.isna(interval.low):
        return f"{cell} (1 run)"
    cell += f" [{interval.low:{number}}, {interval.high:{number}}]"
    if interval.compared_with:
        cell += f" {p_equation(interval.p)}"
    if interval.runs < most:
        cell += f" ({interval.runs} runs)"
    return cell


def markdown_text(intervals: pd.DataFrame, metrics: Sequence[str]) -> str:
    """Build the text of a Markdown file with a table of ``intervals`` for each metric.

    Above each table, a line has the metric's name in bold and a phrase that explains the cells.
    """
    parts = []
    for metric in metrics:
        body = markdown_table(_lines(intervals, metric))
        parts.append(f"**{metric}**, {_explain(intervals, metric)}\n\n{body}")
    return "\n".join(parts)


class CorrectedInterval(NamedTuple):
    """A mean over runs with its 95 % interval, and the p value for a true mean of 0.

    For a single run, the interval and the p value are None.
    """

    mean: float
    low: float | None
    high: float | None
    p: float | None
    runs: int

    def within(self, lowest: float, highest: float) -> CorrectedInterval:
        """Return a copy with the interval clipped to the range from ``lowest`` to ``highest``.

        The mean and the p value stay. An interval without limits is returned unchanged.
        """
        if self.low is None or self.high is None:
            return self
        return self._replace(low=max(self.low, lowest), high=min(self.high, highest))


def corrected_interval(values: Sequence[float], folds: int) -> CorrectedInterval:
    """Compute the mean of ``values``, one per run, with its 95 % corrected resampled t interval.

    A value is a run's metric, or the difference between two methods on the same split. For J runs
    and the sample variance s^2, the variance of the mean is (1/J + 1/(folds - 1)) s^2, with J - 1
    degrees of freedom. The plain 1/J would ignore that runs share training rows. If all values are
    equal, both limits are the mean, and p is 0, or 1 for a mean of 0. For a single run, the limits
    and p are None.
    """
    from scipy import stats

    mean, runs = statistics.fmean(values), len(values)
    if runs == 1:
        return CorrectedInterval(mean, None, None, None, runs)
    # The term 1 / (folds - 1) does not shrink with more runs, because they reuse the same patients
    error = math.sqrt(1 / runs + 1 / (folds - 1)) * statistics.stdev(values)
    if error == 0:
        p = 0.0 if mean else 1.0  # all runs agree on the sign, or on a difference of 0
        return CorrectedInterval(mean, mean, mean, p, runs)
    # Student's t, because the deviation is estimated from the same J values
    half = float(stats.t.ppf(0.975, runs - 1)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, runs - 1))
    return CorrectedInterval(mean, mean - half, mean + half, p, runs)
