"""What a benchmark's rows say: means with intervals, ranks, and whether the ranks differ.

Friedman's test and Nemenyi's critical difference as in Demsar 2006, "Statistical Comparisons of
Classifiers over Multiple Data Sets": average ranks R over N settings of k methods; two methods
differ at 5 % where their R do by more than q sqrt(k (k + 1) / 6 N).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from benchmarks.ranking.rows import Row, best_point
from fedsilo.comparison.tables import mean
from fedsilo.models.measures.intervals import of_mean

RESULTS = (
    *("experiment", "method", "metric", "mean", "low", "high", "seeds"),
    *("accuracy", "kilobytes", "seconds", "samples", "rate", "own"),
)
_COVERAGE = 0.95


def chosen_runs(
    rows: Sequence[Row], seeds: int, trial_seeds: int = 1
) -> dict[tuple[str, str], list[Row]]:
    """Return by experiment and method the runs at the chosen point, of those that are complete."""
    ran: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.run:
            ran.setdefault(row.cell, []).append(row)
    chosen = {}
    for cell, runs in ran.items():
        best = best_point(runs, trial_seeds)
        own = sorted((row for row in runs if row.point == best), key=lambda r: r.seed or 0)
        if len(own) == seeds and not any(row.note for row in own):
            chosen[cell] = own
    return chosen


def results_table(chosen: Mapping[tuple[str, str], Sequence[Row]]) -> pd.DataFrame:
    """Return a row per experiment and method that is complete, with what it reached and cost.

    ``chosen`` has their runs, one per seed, as ``chosen_runs`` returns them.
    """
    records = []
    for (experiment, method), runs in chosen.items():
        metrics = [float(row.test or 0) for row in runs]
        around = of_mean(metrics)
        assert around is not None, "a benchmark has two seeds or more"
        reached = (runs[0].metric, mean(metrics), around.low, around.high, len(runs))
        costs = (
            mean(float(row.accuracy or 0) for row in runs),
            mean((row.up or 0) + (row.down or 0) for row in runs) / 1000,
            mean(float(row.seconds or 0) for row in runs),
            mean(row.samples or 0 for row in runs),
        )
        records.append((experiment, method, *reached, *costs, runs[0].rate, runs[0].own))
    return pd.DataFrame(records, columns=list(RESULTS))


@dataclass(frozen=True)
class Ranking:
    """Methods by average rank over settings, 1 the best."""

    ranks: Mapping[str, float]  # method -> average rank, best first
    settings: int  # how many were ranked over
    # Friedman's chi-squared; None of fewer than three methods or two settings
    statistic: float | None = None
    p: float | None = None  # its p value
    difference: float | None = None  # of average ranks, that is significant at 5 %

    @property
    def is_significant(self) -> bool:
        """Whether Friedman's test finds at 5 % that methods differ; only then compare pairs."""
        return self.p is not None and self.p < 1 - _COVERAGE


def ranking(metrics: pd.DataFrame) -> Ranking:
    """Rank methods (index) over settings (columns) by a metric of which more is better.

    Methods that lack a setting are left out; equals share the mean of their ranks.
    """
    from scipy.stats import friedmanchisquare, studentized_range

    complete = metrics.dropna()
    methods, settings = complete.shape
    ranks = complete.rank(ascending=False).mean(axis=1).sort_values(kind="stable")
    averages = {str(name): float(rank) for name, rank in ranks.items()}
    if methods < 3 or settings < 2:
        return Ranking(averages, settings)
    test = friedmanchisquare(*complete.to_numpy())
    q = studentized_range.ppf(_COVERAGE, methods, math.inf) / math.sqrt(2)
    difference = float(q * math.sqrt(methods * (methods + 1) / (6 * settings)))
    return Ranking(averages, settings, float(test.statistic), float(test.pvalue), difference)


def relative_costs(results: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Return each method's costs as multiples of FedAvg's, geometric means over its settings.

    The costs are "bytes" and "samples". A method without training has 0 samples.
    """
    costs = ["kilobytes", "samples"]
    usual = results[results["method"] == "fedavg"].set_index("experiment")[costs]
    own = results[results["experiment"].isin(usual.index)].set_index(["method", "experiment"])
    logs = (own[costs] / usual).map(_log).groupby("method", sort=False).mean()
    found = {}
    for method, *means in logs.itertuples():
        size, samples = map(math.exp, means)
        found[str(method)] = {"bytes": size, "samples": samples}
    return found


def _log(times: float) -> float:
    """Return the logarithm, and minus infinity for 0."""
    if times > 0:
        return math.log(times)
    return -math.inf


def equals(chosen: Mapping[tuple[str, str], Sequence[Row]]) -> dict[str, list[list[str]]]:
    """Return by experiment the groups of methods whose metrics are equal to the last digit."""
    groups: dict[str, dict[Any, list[str]]] = {}
    for (experiment, method), runs in chosen.items():
        metrics = tuple((row.rate, row.validation, row.loss, row.test) for row in runs)
        groups.setdefault(experiment, {}).setdefault(metrics, []).append(method)
    return {
        experiment: same
        for experiment, found in groups.items()
        if (same := [methods for methods in found.values() if len(methods) > 1])
    }
