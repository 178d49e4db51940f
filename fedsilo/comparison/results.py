"""Collects the metrics of runs from their summaries into the tidy table of tables.py.

``POOLED`` is a metric that single sites do not report: balanced accuracy over the samples of all
sites. A mean of balanced accuracy over sites leaves out a site with one class, and a mean of
accuracy rewards a model that always predicts this class there. Pooled, each sample counts within
its class.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import pandas as pd

from fedsilo.comparison.tables import tidy
from fedsilo.core.errors import SettingError, unknown_name
from fedsilo.core.metric_names import OVERALL, read_metric
from fedsilo.core.one_line import join_names
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.records.partial_means import SiteMetrics, Summary, sites_without
from fedsilo.server_app.records.summary import by_distribution, means

CONSTANT = "always positive (class 1)"


def of_split(summary: Summary, split: str) -> dict[str, Any]:
    """Return a copy of a run's summary for a split, ``test`` or ``val``.

    The copy for ``test`` is equal to ``summary``. In the copy for ``val``, the means over all sites
    and over each distribution (a group of sites) are those of the validation samples. The published
    numbers are then None, because papers publish test metrics. The metrics of single sites are
    always those of test samples.
    """
    if split == "test":
        return dict(summary)
    return {**summary, **summary["validation"], "published": None}


def shared_metrics(
    runs: Sequence[FinishedRun], metrics: Sequence[SiteMetrics]
) -> list[SiteMetrics]:
    """Keep only metrics that all runs have at a site, so that their means cover the same sites.

    If a run lacks a metric at a site, all runs on the same data set lose the metric at this site.
    There is one exception. A run that measured the metric at no site at all removes it from no
    other run. If the runs on a data set have no site in common, each run is checked only at its
    own sites, and not at the sites of other runs.

    Args:
        runs: the finished runs.
        metrics: the metrics of each run: site -> metric -> value.

    Returns:
        The metrics that remain, in the order of ``runs``. A single run keeps all its metrics.
    """
    if len(runs) == 1:
        return list(metrics)
    lacking = _lacking_metrics(runs, metrics)
    kept_of_runs: list[SiteMetrics] = []
    for run, by_site in zip(runs, metrics, strict=True):
        data = run.summary["dataset"]
        kept_of_run: dict[str, dict[str, float]] = {}
        for site, row in by_site.items():
            kept_of_run[site] = {}
            for metric, value in row.items():
                if (data, site, metric) not in lacking:
                    kept_of_run[site][metric] = value
        kept_of_runs.append(kept_of_run)
    return kept_of_runs


def _lacking_metrics(
    runs: Sequence[FinishedRun], metrics: Sequence[SiteMetrics]
) -> set[tuple[str, str, str]]:
    """Find each (data set, site, metric) where a run lacks a metric that it has at another site.

    If the runs on a data set have a site in common, each run is checked at all sites of these runs.
    It also lacks its metrics at sites that it does not have. Without a common site, each run is
    checked only at its own sites.

    Args:
        runs: the finished runs.
        metrics: the metrics of each run, in the same order: site -> metric -> value.
    """
    sites_of: dict[str, list[set[str]]] = {}  # data set -> the sites of each run
    for run in runs:
        sites_of.setdefault(run.summary["dataset"], []).append(set(run.silos))
    lacking: set[tuple[str, str, str]] = set()
    for run, by_site in zip(runs, metrics, strict=True):
        data = run.summary["dataset"]
        measured: set[str] = set()
        for site in run.silos:
            measured.update(by_site.get(site, {}))
        # Runs without a common site are not compared site by site, so each has only its own sites
        expected = set(run.silos)
        # Runs with a common site must have their metrics at the sites of all runs
        if set.intersection(*sites_of[data]):
            expected = set.union(*sites_of[data])
        for site in expected:
            for metric in measured - by_site.get(site, {}).keys():
                lacking.add((data, site, metric))
    return lacking


def shared_summaries(runs: Sequence[FinishedRun], split: str) -> list[dict[str, Any]]:
    """Return a copy of each run's summary for a split, with means over the same sites.

    If a run lacks a metric at a site, no mean of the runs on its data set includes the metric at
    this site. A run that has the metric at no site does not count. The row of a distribution (a
    group of sites) with a single site is not a mean, so it keeps all metrics of the site.

    Args:
        runs: the finished runs.
        split: ``test`` or ``val``, the samples that the metrics were measured on.

    Returns:
        The summaries in the order of ``runs``, with three more keys. ``published`` has the paper's
        numbers, or None for ``val``. ``lacking`` has for each metric the sites that its mean leaves
        out. ``site_count`` is the number of the run's sites.
    """
    ends = [run.last_metrics(split) for run in runs]
    summaries = []
    for run, own, shared in zip(runs, ends, shared_metrics(runs, ends), strict=True):
        summary = of_split(run.summary, split)
        if split == "test":
            summary["published"] = run.paper.numbers
        # Readers would take a mean over some hospitals for one over all, so record its gaps
        summary["lacking"] = sites_without(shared, list(run.silos))
        summary["site_count"] = len(run.silos)
        if shared != own:
            groups = {site: str(facts["distribution"]) for site, facts in run.silos.items()}
            sizes = Counter(groups.values())
            rows = dict(shared)
            for site, row in own.items():
                # The row of a single site is not a mean, so it keeps what other runs lack
                if site in groups and sizes[groups[site]] == 1:
                    rows[site] = row
            summary["mean"] = means(shared)
            summary["distributions"] = by_distribution(rows, groups)
        summaries.append(summary)
    return summaries


def summaries_by_seed(
    experiments: Sequence[str], runs: Sequence[FinishedRun], split: str
) -> dict[str, dict[int, dict[str, Any]]]:
    """Group the summaries of runs for a split: experiment -> seed -> summary.

    The means in all summaries of a data set cover the same sites, as far as the runs have sites in
    common. If several runs of an experiment have the same seed, the last run is used.

    Args:
        experiments: the name of each run's experiment, in the order of ``runs``.
        runs: the finished runs.
        split: ``test`` or ``val``.
    """
    summaries: dict[str, dict[int, dict[str, Any]]] = {}
    for experiment, summary in zip(experiments, shared_summaries(runs, split), strict=True):
        summaries.setdefault(experiment, {})[int(summary["seed"])] = summary
    return summaries


def chosen_metrics(
    wanted: str, summaries: Sequence[Summary], option: str, measured: Collection[str] = ()
) -> list[str]:
    """Select the metrics that the user names from those that at least one summary has.

    Args:
        wanted: names and shell-style patterns, separated by commas.
        summaries: the runs' summaries, without metrics that are hidden because they rest on too few
            samples.
        option: the command's option that gave ``wanted``. Error messages begin with it.
        measured: all metrics that the runs have, also hidden ones.

    Returns:
        The metrics, each once, in the order of ``wanted``. Metrics that match one pattern are
        sorted by name.

    Raises:
        SettingError: a name or pattern matches no metric. If a named metric was measured but is
            hidden, the message says so.
    """
    known: set[str] = set()
    for summary in summaries:
        known.update(summary["mean"])
    names = {part.strip() for part in wanted.split(",")}
    withheld = sorted((names & set(measured)) - known)
    if withheld:
        raise SettingError(
            f"{option}: {join_names(withheld)} rests on too few samples to be shown, at each site "
            "of some run ('privacy.sums-min-count'): give --no-floor if you may see it; the runs "
            "are kept"
        )
    return matching(wanted, sorted(known), option)


def refuse_unmeasured(wanted: str, option: str) -> None:
    """Check before any run that fedsilo can measure the metrics that the user names.

    Only the runs show which metrics match a pattern, such as ``auc-*``, and which metrics depend on
    the names of sites, such as ``routing.<site>.mean``. These are not checked.

    Args:
        wanted: names and patterns of metrics, separated by commas.
        option: the command's option that gave ``wanted``. The error message begins with it.

    Raises:
        SettingError: a name is not that of a metric that fedsilo's methods measure.
    """
    for part in wanted.split(","):
        name = part.strip()
        read = read_metric(name)
        # Metrics of a family, such as routing.<site>.mean, depend on the sites
        if set(name) & set("*?[") or (read and read.part):
            continue
        word = (read.word if read else name).removeprefix("own-").removeprefix("labels-")
        if word not in OVERALL:
            raise SettingError(f"{option}: {unknown_name('metric', name, OVERALL)}")


def matching(wanted: str, known: Sequence[str], option: str) -> list[str]:
    """Select metrics from ``known`` by name, each once.

    ``wanted`` has names and shell-style patterns, separated by commas, such as ``auc, loss*``. The
    result has the order of ``wanted``. Metrics that match one pattern are in the order of
    ``known``.

    Raises:
        SettingError: a name or pattern matches no known metric. The message begins with ``option``.
    """
    chosen: dict[str, None] = {}
    for part in wanted.split(","):
        pattern = part.strip()
        fitting = [metric for metric in known if metric == pattern or fnmatchcase(metric, pattern)]
        if not fitting:
            raise SettingError(f"{option}: {unknown_name('metric', pattern, known)}")
        chosen |= dict.fromkeys(fitting)
    return list(chosen)


def metric_of(summary: Summary, group: str, metric: str) -> float | None:
    """Return the value of a metric for a group of sites in a run's summary.

    The result is None if the run lacks the metric for the group.

    Args:
        summary: the summary.
        group: the name of a distribution (a group of sites), or "all" for the mean over sites.
        metric: the name of the metric.
    """
    values = summary["mean"]
    if group != "all":
        values = summary["distributions"].get(group, {})
    if metric not in values:
        return None
    return float(values[metric])


def values_by_seed(
    runs: Mapping[str, Mapping[int, Summary]], metric: str
) -> dict[str, dict[int, float]]:
    """Collect the mean of a metric over sites: experiment -> seed -> mean.

    ``runs`` has the summary of each seed of each experiment. A seed whose run lacks the mean is
    left out. An experiment in which all seeds lack it has an empty mapping.
    """
    values: dict[str, dict[int, float]] = {}
    for name, by_seed in runs.items():
        values[name] = {}
        for seed, summary in by_seed.items():
            value = metric_of(summary, "all", metric)
            if value is not None:
                values[name][seed] = value
    return values


def experiment_results(
    experiment: str, summaries: Mapping[int, Summary], metrics: Sequence[str]
) -> pd.DataFrame:
    """Build the tidy results of one experiment: a row for each group, metric and seed.

    A row has the experiment, method, seed, group, metric and value. It also has the value and
    standard deviation that a paper published, or None. Groups are the distributions (groups of
    sites) of the runs, then ``all``. Rows are in the order of groups, then metrics, then seeds. A
    metric that a run lacks for a group, such as AUC with one class, has no row. Method and
    published values come from the first summary.

    Args:
        experiment: the experiment's name.
        summaries: seed -> summary of the run.
        metrics: the names of the metrics.
    """
    first = next(iter(summaries.values()))
    published = first.get("published") or {}
    records = []
    groups: dict[str, None] = {}  # the distributions of all runs, each once, in their order
    for summary in summaries.values():
        groups |= dict.fromkeys(summary["distributions"])
    # Seeds of one group and metric stand together, since a reader compares them
    for group in [*groups, "all"]:
        paper = published.get(group, {})
        for metric in metrics:
            for seed, summary in summaries.items():
                value = metric_of(summary, group, metric)
                if value is not None:
                    as_published = (paper.get(metric), paper.get(f"{metric}-sd"))
                    cells = (experiment, first["method"], seed, group, metric, value, *as_published)
                    records.append(cells)
    return tidy(records)


def constant_results(
    silos: Mapping[str, Any], split: str, metrics: Sequence[str] | None = None, seed: int = 0
) -> pd.DataFrame:
    """Build the tidy results of a baseline that always predicts the second of two classes.

    At a site, its accuracy is the share of that class. Its balanced accuracy and its AUC are 0.5,
    or missing if the samples have one class. The table has a row for each metric of each
    distribution (group of sites), and of ``all``, the mean over sites. It covers sites with two
    classes, at least one sample in the split, and no hidden count. If there are none, it is empty.

    Args:
        silos: the content of ``silos.json``, with the label counts of each site.
        split: ``test`` or ``val``.
        metrics: the metrics to return. None for all.
        seed: the value in the column ``seed``.
    """
    scores: dict[str, dict[str, float]] = {}
    for site, facts in silos.items():
        counts = facts["label_counts"].get(split, [])
        # Label counts are [class 0, class 1]; always predicting 1 is right for the second
        # A count that may not be shown is None
        if len(counts) == 2 and None not in counts and sum(counts):
            scores[site] = {"accuracy": counts[1] / sum(counts)}
            if all(counts):
                scores[site] |= {"balanced-accuracy": 0.5, "auc": 0.5}
    if not scores:
        return tidy([])
    groups = by_distribution(scores, {site: silos[site]["distribution"] for site in scores})
    records = []
    for group, values in [*groups.items(), ("all", means(scores))]:
        for metric, value in values.items():
            if metrics is None or metric in metrics:
                records.append((CONSTANT, "constant", seed, group, metric, value, None, None))
    return tidy(records)


POOLED = "pooled-balanced-accuracy"


@dataclass(frozen=True)
class TwoClassMetrics:
    """A site's number of samples in each of two classes, and its metrics on them.

    ``balanced`` is the balanced accuracy; None if all samples are of one class.
    """

    counts: Sequence[int]
    accuracy: float
    balanced: float | None

    def count_correct(self) -> tuple[int, int] | None:
        """Recover the number of correct predictions in each class from a site's metrics.

        The classes have n0 and n1 samples, of which r0 and r1 were predicted correctly. Accuracy is
        (r0 + r1) / (n0 + n1), and balanced accuracy is (r0 / n0 + r1 / n1) / 2. These two equations
        are solved for r0 and r1, which are rounded. If a class has no samples, accuracy suffices.
        The result is None if the equations do not determine r0 and r1, because n0 equals n1 or
        balanced accuracy is missing.
        """
        first, second = self.counts
        # Metrics are float32, and counts are whole numbers
        right = round(self.accuracy * (first + second))
        if not second:
            return right, 0
        if not first:
            return 0, right
        if first == second or self.balanced is None:
            return None
        # r0 = right - r1 from the accuracy, put into the balanced accuracy and solved for r1
        of_second = (2 * self.balanced - right / first) / (1 / second - 1 / first)
        return right - round(of_second), round(of_second)


def pooled_balanced_accuracy(sites: Iterable[TwoClassMetrics]) -> float | None:
    """Compute the balanced accuracy over the samples of all sites together, from 0 to 1.

    For each class, the samples and the correct predictions of all sites are added up. A site's
    correct predictions are computed from its accuracy and balanced accuracy. This is impossible
    with equally many samples of both classes, because the two metrics are then equal. The result is
    None if it is impossible at some site, or if all samples are of one class.
    """
    counts = [0, 0]
    correct = [0, 0]
    for site in sites:
        correct_here = site.count_correct()
        if correct_here is None:
            return None
        for label in (0, 1):
            counts[label] += site.counts[label]
            correct[label] += correct_here[label]
    if not all(counts):
        return None
    return statistics.fmean((correct[0] / counts[0], correct[1] / counts[1]))


def pooled_metric(run: FinishedRun, split: str) -> dict[str, float]:
    """Compute a run's balanced accuracy over the samples of all sites together.

    It is computed from each site's number of samples in each of two classes, and from its accuracy
    and balanced accuracy on ``split`` in the last evaluated round. Sites without an accuracy are
    left out.

    Returns:
        A dictionary with only the key "pooled-balanced-accuracy". It is empty if a site with any
        metric on ``split`` does not have the counts of two classes. It is also empty if a site's
        metrics do not determine its correct predictions, or if all samples are of one class.
    """
    own: dict[str, dict[str, float]] = {}
    # Later rows overwrite earlier ones, so the last measured round stays
    for row in run.metric_rows:
        if row["split"] == split and row["site"] in run.silos:
            own.setdefault(row["site"], {})[row["metric"]] = float(row["value"])
    counts = {site: run.silos[site]["label_counts"].get(split, []) for site in own}
    if any(len(labels) != 2 for labels in counts.values()):
        return {}
    measured = []
    for site, values in own.items():
        if "accuracy" in values:
            balanced = values.get("balanced-accuracy")
            measured.append(TwoClassMetrics(counts[site], values["accuracy"], balanced))
    pooled = pooled_balanced_accuracy(measured)
    if pooled is None:
        return {}
    return {POOLED: pooled}
