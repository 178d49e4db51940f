"""What runs have found, taken out of their summaries into the one tidy table of tables.py."""

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import pandas as pd

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings_schema import unknown_name
from fedsilo.server_app.records.summary import by_distribution, means
from fedsilo.server_app.studies.compare.tables import tidy
from fedsilo.server_app.studies.finished_run import FinishedRun

Summary = Mapping[str, Any]
Figures = Mapping[str, Mapping[str, float]]  # site -> metric -> value

CONSTANT = "always positive (class 1)"


def of_split(summary: Summary, split: str) -> dict[str, Any]:
    """Return ``summary`` with the figures of ``split``, ``test`` or ``val``.

    Choices between settings are made on validation figures; the papers published no such.
    """
    if split == "test":
        return dict(summary)
    return {**summary, **summary["validation"], "published": None}


def last_figures(run: FinishedRun, split: str) -> dict[str, dict[str, float]]:
    """Return site -> metric -> value of a run's last round."""
    last, values = str(run.summary["rounds"]), dict[str, dict[str, float]]()
    for row in run.metrics:
        if row["round"] == last and row["split"] == split:
            values.setdefault(row["site"], {})[row["metric"]] = float(row["value"])
    return values


def shared_figures(runs: Sequence[FinishedRun], figures: Sequence[Figures]) -> list[Figures]:
    """Return each run's figures without those of a site that another run on the data set lacks.

    Means over other sites would differ by the sites. A run that has a metric of no site, as that of
    another method or of all sites together, lacks none; nor do runs without any site in common.
    """
    data_sets = [run.summary["dataset"] for run in runs]
    sites_of: dict[str, list[set[str]]] = {}
    for run, data in zip(runs, data_sets, strict=True):
        sites_of.setdefault(data, []).append(set(run.silos))
    lacking: set[tuple[str, str, str]] = set()
    for run, data, by_site in zip(runs, data_sets, figures, strict=True):
        measured = {metric for site in run.silos for metric in by_site.get(site, {})}
        comparable = set.intersection(*sites_of[data])
        for site in set.union(*sites_of[data]) if comparable else run.silos:
            lacking |= {(data, site, metric) for metric in measured - by_site.get(site, {}).keys()}
    return [
        {
            site: {metric: v for metric, v in row.items() if (data, site, metric) not in lacking}
            for site, row in by_site.items()
        }
        for data, by_site in zip(data_sets, figures, strict=True)
    ]


def shared_summaries(runs: Sequence[FinishedRun], split: str) -> list[dict[str, Any]]:
    """Return the runs' summaries of a split, with means over the sites of ``shared_figures``.

    A distribution of one site has all figures of that site.
    """
    ends = [last_figures(run, split) for run in runs]
    summaries = []
    for run, own, shared in zip(runs, ends, shared_figures(runs, ends), strict=True):
        summary = of_split(run.summary, split)
        if shared != own:
            groups = {site: str(facts["distribution"]) for site, facts in run.silos.items()}
            sizes = Counter(groups.values())
            alone = {s: row for s, row in own.items() if s in groups and sizes[groups[s]] == 1}
            distributions = by_distribution({**shared, **alone}, groups)
            summary |= {"mean": means(shared), "distributions": distributions}
        summaries.append(summary)
    return summaries


def chosen_metrics(wanted: str, summaries: Sequence[Summary], option: str) -> list[str]:
    """Return the metrics of the runs' summaries that ``wanted`` names; see ``matching``."""
    known = {metric for summary in summaries for metric in summary["mean"]}
    return matching(wanted, sorted(known), option)


def matching(wanted: str, known: Sequence[str], option: str) -> list[str]:
    """Return the known metrics that ``wanted`` names, in its order.

    It has names and shell-style patterns, separated by commas.

    Raises:
        SettingError: one fits no metric of any run; begins with ``option``.
    """
    chosen: dict[str, None] = {}
    for pattern in [part.strip() for part in wanted.split(",")]:
        fitting = [metric for metric in known if metric == pattern or fnmatchcase(metric, pattern)]
        if not fitting:
            raise SettingError(f"{option}: {unknown_name('metric', pattern, known)}")
        chosen |= dict.fromkeys(fitting)
    return list(chosen)


def figure_of(summary: Summary, group: str, metric: str) -> float | None:
    """Return a run's figure of a distribution or ``all``, None where it has none."""
    values = summary["mean"] if group == "all" else summary["distributions"].get(group, {})
    return float(values[metric]) if metric in values else None


def values_by_seed(
    runs: Mapping[str, Mapping[int, Summary]], metric: str
) -> dict[str, dict[int, float]]:
    """Return experiment -> seed -> mean over sites, without seeds that leave it undefined."""
    return {
        name: {
            seed: value
            for seed, summary in by_seed.items()
            if (value := figure_of(summary, "all", metric)) is not None
        }
        for name, by_seed in runs.items()
    }


def experiment_results(
    experiment: str, summaries: Mapping[int, Summary], metrics: Sequence[str]
) -> pd.DataFrame:
    """Return the results of one experiment's runs, by seed: its distributions, then ``all``.

    A figure that is undefined for a group (AUC of one class) has no row.
    """
    first = next(iter(summaries.values()))
    published = first.get("published") or {}
    records = []
    groups = dict.fromkeys(name for one in summaries.values() for name in one["distributions"])
    for group in [*groups, "all"]:
        paper = published.get(group, {})
        for metric in metrics:
            for seed, summary in summaries.items():
                value = figure_of(summary, group, metric)
                if value is not None:
                    as_published = (paper.get(metric), paper.get(f"{metric}-sd"))
                    cells = (experiment, first["method"], seed, group, metric, value, *as_published)
                    records.append(cells)
    return tidy(records)


def constant_results(
    silos: Mapping[str, Any], split: str, metrics: Sequence[str] | None = None, seed: int = 0
) -> pd.DataFrame:
    """Return what answering the second of two classes every time would score, per distribution.

    A predictor that has seen nothing: to compare a method's accuracy with. More than two classes
    have none. ``silos`` is the content of the ``silos.json`` of a ``seed``; without ``metrics`` all
    are returned.
    """
    scores: dict[str, dict[str, float]] = {}
    for site, facts in silos.items():
        counts = facts["label_counts"].get(split, [])
        if len(counts) == 2 and sum(counts):
            scores[site] = {"accuracy": counts[1] / sum(counts)}
            if all(counts):
                scores[site] |= {"balanced-accuracy": 0.5, "auc": 0.5}
    if not scores:
        return tidy([])
    groups = by_distribution(scores, {site: silos[site]["distribution"] for site in scores})
    return tidy(
        (CONSTANT, "constant", seed, group, metric, value, None, None)
        for group, values in [*groups.items(), ("all", means(scores))]
        for metric, value in values.items()
        if metrics is None or metric in metrics
    )
