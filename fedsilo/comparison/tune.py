"""``fedsilo tune``: chooses an experiment's settings on validation folds of the training data.

simulation.yaml declares the grid of an experiment and the budget for all experiments: the number of
points, folds and seeds. Optuna draws the points (search.py). If sites are cut into folds, no trial
reads a test row. A data set with its own validation part is not split into folds, and its test
metrics are not used. The deciding metric is the first of the data set's headline metrics that all
runs have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from fedsilo.comparison.results import POOLED
from fedsilo.comparison.search import Search, at_an_edge, refuse_small, without_effect
from fedsilo.comparison.slurm import Jobs
from fedsilo.comparison.tables import deviation, mean, rich_table
from fedsilo.comparison.trials import FAILED, Trial, run_groups, trial_settings
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import RunFailedError, SettingError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.metric_names import best_direction
from fedsilo.core.one_line import format_count
from fedsilo.core.settings.removed import RENAMED
from fedsilo.core.settings_schema import SettingRule, Value, as_mapping, rule_of, setting
from fedsilo.datasets.registry import data_fingerprint, data_set, shown_metrics
from fedsilo.engines.experiments import declared_experiment, read_section, simulation_file
from fedsilo.engines.planning import plan_run
from fedsilo.server_app.config.settings import RunSettings
from fedsilo.server_app.records.run_directory import runs_folder

Summaries = Sequence[Sequence[Mapping[str, Any]]]  # the summaries of each point's runs

SHOWN = 5  # largest number of points in the terminal's table


@dataclass(frozen=True)
class Tuning:
    """The budget of tuning, the same for every experiment: 'tuning' in simulation.yaml."""

    trials: int = setting(16, "points of the grid that are tried", ge=1)
    folds: int = setting(5, "validation folds of the training data", ge=2)
    seeds: int = setting(3, "seeds, each with another shuffling into folds", ge=1)


@dataclass(frozen=True)
class Point:
    """A point of the grid with its scores over the folds of all seeds."""

    settings: Mapping[str, Value]  # the values that were tried
    score: float  # mean of the deciding metric over sites, folds and seeds
    error: float  # its standard error over folds and seeds
    loss: float  # mean validation loss, which decides between equal scores
    sites: Mapping[str, float]  # the score of each site
    digest: str = ""  # digest over all metrics of its runs
    failed: str = ""  # the reason why a run failed, or empty; the scores are 0 then


@dataclass(frozen=True)
class Tuned:
    """The result of a search: the ranked points, the content of chosen.json, and the folder."""

    metric: str
    ranked: Sequence[Point]
    document: Mapping[str, Any]
    folder: Path

    def lines(self) -> Iterator[Table | str]:
        """Yield the result of tuning as a table and lines for the terminal.

        The parts come in this order:

        - a table of the best points, at most five, without points that failed
        - the reason for the choice
        - a line for each warning
        - a line with the chosen settings as YAML for simulation.yaml
        - a line with the folder of the results
        """
        yield self._table()
        yield str(self.document["why"])
        for warning in self.document["warnings"]:
            yield f"warning: {warning}"
        pairs = []
        for key, value in self.ranked[0].settings.items():
            pairs.append(f"{key}: {json.dumps(value)}")
        tried = self.document["budget"]["trials"]
        yield f"for simulation.yaml: {{{', '.join(pairs)}}}, and next to 'config' trials: {tried}"
        yield f"written to {self.folder}"

    def _table(self) -> Table:
        best = [point for point in self.ranked[:SHOWN] if not point.failed]
        lines = [[*best[0].settings, f"val {self.metric}", "val loss"]]
        for point in best:
            cells = (f"{point.score:.4f} ± {point.error:.4f}", f"{point.loss:.4f}")
            lines.append([*map(str, point.settings.values()), *cells])
        return rich_table("the best " + format_count(len(best), "point"), lines, left=0)


def search(
    plan: Plan, sampler: str, metric: str | None, jobs: Jobs, tell: Callable[[str], None]
) -> Tuned:
    """Try the points of a plan, choose the best, and write ``chosen.json`` and ``trials.csv``.

    A point is one choice of values for the settings to tune. If training fails at a point, the
    sampler sees the point as at most equal to the worst other point of its batch. A failed point is
    never chosen, and the warnings in ``chosen.json`` name it.

    Args:
        plan: the settings, the grid, and the numbers of points, folds and seeds.
        sampler: ``grid`` or ``tpe``.
        metric: the metric that decides: a mean over the sites that have it, or ``POOLED``, which is
            over all samples. None for the task's first main metric that every successful run has.
        jobs: the number of runs at once, 0 to use all cores, or Slurm's parameters.
        tell: is called with a line about the number of runs, before the first one.

    Raises:
        FedsiloError: training failed at every point, a successful run lacks the metric, or Optuna
            is missing.
    """
    ranked, decides = _run_search(plan, sampler, metric, jobs, tell)
    if ranked[0].failed:
        raise RunFailedError(f"all {len(ranked)} points failed; the first one: {ranked[0].failed}")
    document = chosen_document(plan, ranked, decides, sampler)
    write_atomically(plan.folder / "chosen.json", json.dumps(document, indent=2) + "\n")
    return Tuned(decides, ranked, document, plan.folder)


@dataclass(frozen=True)
class Plan:
    """The plan of a search: the experiment's settings, its grid, and the budget."""

    experiment: str
    base: RunSettings
    grid: Mapping[str, Sequence[Value]]
    budget: Tuning

    @property
    def folder(self) -> Path:
        """The folder of ``chosen.json`` and of all trials."""
        return runs_folder(self.base.common.out) / f"tune-{self.experiment}"

    @property
    def rules(self) -> dict[str, SettingRule]:
        """Map the key of each setting in the grid to its rule, which has its type and range."""
        rules = {}
        for part in (self.base.common, self.base.own):
            for key in as_mapping(part):
                if key in self.grid:
                    rules[key] = rule_of(type(part), key)
        return rules


def plan_search(
    experiment: str, sources: RunSources, sampler: str, given: Mapping[str, int | None]
) -> Plan:
    """Plan a search for the best settings of an experiment, over the grid in its simulation file.

    If the data set has its own validation part, the plan has one fold.

    Args:
        experiment: the experiment's name.
        sources: the simulation file, the TOML file and the changes that the command names.
        sampler: ``grid``, which tries points of the grid, or ``tpe``, which also tries numbers
            between the values of the grid.
        given: ``trials``, ``folds`` or ``seeds`` -> a number that replaces the one in the
            simulation file, or None to keep that one.

    Raises:
        SettingError: in one of these cases:

            - The grid has fewer points than ``trials``.
            - A setting is wrong, or ``--set`` changes a setting of the grid.
            - There are fewer than two folds, and the data set has no validation part.
    """
    file = simulation_file(sources.file)
    budget = read_section(file, "tuning", Tuning)
    for key, value in given.items():
        if value is not None:
            budget = replace(budget, **{key: value})
    grid = declared_experiment(experiment, sources).grid
    refuse_small(grid, sampler, budget.trials, experiment)
    base, _ = plan_run(experiment, sources)
    budget = _fit_folds(budget, base.common.dataset)
    # The grid would override such a value without a word
    twice = []
    for text in sources.changes:
        key = text.partition("=")[0].strip()
        if RENAMED.get(key, key) in grid:
            twice.append(text)
    if twice:
        raise SettingError(
            f"--set {', '.join(twice)}: the grid of this experiment has this setting; remove --set"
        )
    return Plan(experiment, base, grid, budget)


def _fit_folds(budget: Tuning, dataset: str) -> Tuning:
    """Return the budget with one fold if the data set has its own validation part.

    The budget holds the numbers of points, folds and seeds. For other data sets, it is returned
    unchanged.

    Raises:
        SettingError: the data set has no validation part, and the budget has fewer than two folds.
    """
    if "split.val-folds" not in data_set(dataset).settings:
        return replace(budget, folds=1)
    if budget.folds < 2:
        raise SettingError(
            f"--folds must be at least 2, because data set '{dataset}' has no validation part of "
            f"its own, but is {budget.folds}"
        )
    return budget


def _run_search(
    plan: Plan, sampler: str, metric: str | None, jobs: Jobs, tell: Callable[[str], None]
) -> tuple[list[Point], str]:
    """Train all points of a search, and rank them by the deciding metric on validation samples.

    The file ``trials.csv`` is rewritten after each batch of points. Trials that finished in an
    earlier call are not repeated.

    Args:
        plan: the settings, the grid, and the numbers of points, folds and seeds.
        sampler: ``grid`` or ``tpe``.
        metric: the deciding metric. None for the task's first main metric that every successful run
            has.
        jobs: the number of runs at once, 0 to use all cores, or Slurm's parameters.
        tell: is called with a line about the number of runs, before the first one.

    Returns:
        The points with their scores, the best first, and the name of the deciding metric.

    Raises:
        SettingError: a run that did not fail lacks the deciding metric.
        FedsiloError: a run failed for a reason other than its training.
    """
    base, budget, data = plan.base, plan.budget, data_fingerprint(plan.base.common)
    search = Search(plan.grid, sampler, budget.trials)
    points: list[dict[str, Value]] = []
    groups: list[list[Trial]] = []
    summaries: list[list[dict[str, Any]]] = []
    for batch in search.batches():
        tried = []
        for point in batch:
            tried.append(_trials(base.as_mapping(), point, budget, data))
        if not points:
            runs = format_count(budget.trials * len(tried[0]), "run")
            of = f"{format_count(budget.trials, 'point')}, {_pieces(budget)}"
            tell(f"{plan.experiment}: {of}: {runs} on training data")
        found = run_groups(tried, plan.folder / "trials", jobs, go_on=True)
        points, groups, summaries = [*points, *batch], [*groups, *tried], [*summaries, *found]
        # A later batch may lack a metric that all runs had so far, so it is chosen anew
        decides = metric or deciding_metric(
            shown_metrics(base.common.dataset, base.common.task), summaries
        )
        _refuse_unmeasured(decides, summaries)
        search.tell(_as_gains(_score_points(batch, found, decides), decides))
        write_atomically(plan.folder / "trials.csv", _csv(groups, summaries, decides))
    return ranking(points, summaries, decides), decides


def _trials(
    base: Mapping[str, Value], point: Mapping[str, Value], budget: Tuning, data: str
) -> list[Trial]:
    """Build the trials of one point, that is, one choice of values for the settings to tune.

    There is a trial for each seed and validation fold: all folds of the first seed, then all of the
    next. With several folds, the seed also decides which rows are in which fold, and test rows are
    not read. With one fold, the data set's own validation part is used.

    Args:
        base: the settings of the experiment.
        point: the settings to try, which override ``base``.
        budget: the numbers of folds and seeds.
        data: the digest of the experiment's data, by which a finished trial is recognised.

    Raises:
        SettingError: the settings are not valid together. The message names the point.
    """
    trials = []
    for seed, fold in product(range(budget.seeds), range(budget.folds)):
        folds = {
            "split.val-folds": budget.folds,
            "split.val-fold": fold,
            "split.fold-seed": seed,
            "split.use-test": False,
        }
        values: dict[str, Value] = {**base, **point, "seed": seed}
        # With folds, test rows are not even read, because the choice must not depend on them
        if budget.folds > 1:
            values |= folds
        try:
            settings = trial_settings(values)
        except SettingError as error:
            raise SettingError(f"grid point {dict(point)}: {error}") from None
        trials.append(Trial(settings, {**point, "seed": seed, "fold": fold}, data))
    return trials


def _refuse_unmeasured(metric: str, summaries: Summaries) -> None:
    """Check that all successful runs measured ``metric`` on validation samples.

    Raises:
        SettingError: a successful run lacks the metric. The message says how many runs lack it.
    """
    means = _validation_means(summaries)
    lacking = sum(metric not in values for values in means)
    if not lacking:
        return
    why = ""
    if metric == POOLED:
        why = " (it needs two classes, with different numbers of validation samples at every site)"
    raise SettingError(
        f"--metric {metric}: {lacking} of {len(means)} runs lack this validation metric{why}: name "
        "another metric; all runs are kept"
    )


def _validation_means(summaries: Summaries) -> list[Mapping[str, float]]:
    """Collect the validation metrics of all runs that did not fail.

    Returns:
        A flat list with a mapping for each such run: metric -> mean over sites. Runs of the same
        point are next to each other.
    """
    means = []
    for summary in chain(*summaries):
        if FAILED not in summary:
            means.append(summary["validation"]["mean"])
    return means


def deciding_metric(headline: Sequence[str], summaries: Summaries) -> str:
    """Choose the metric by which points are compared, if the user named none.

    The result is the first of the ``headline`` metrics that every successful run has on validation
    samples. A run may lack a metric: for example, AUC is undefined in a fold with one class. If the
    runs have no headline metric in common, the result is "accuracy".

    Args:
        headline: the task's main metrics, in order of preference.
        summaries: the summaries of each point's runs.
    """
    means = _validation_means(summaries)
    for metric in headline:
        if all(metric in values for values in means):
            return metric
    return "accuracy"


def ranking(
    points: Sequence[Mapping[str, Value]], summaries: Summaries, metric: str
) -> list[Point]:
    """Score the points by the mean of ``metric`` over their runs, and sort them, the best first.

    A higher score is better, except for metrics that measure an error, such as "mae". If two scores
    are equal to six decimals, the point with the lower validation loss comes first. If the losses
    are equal too, the order of ``points`` decides. Points with a failed run come last.
    """
    scored = _score_points(points, summaries, metric)
    sign = _sign_of(metric)
    return sorted(scored, key=lambda p: (bool(p.failed), -sign * round(p.score, 6), p.loss))


def _sign_of(metric: str) -> int:
    """Return -1 for a metric for which a lower value is better, and otherwise 1."""
    if best_direction(metric) < 0:
        return -1
    return 1


def _as_gains(points: Sequence[Point], metric: str) -> list[float]:
    """Convert the scores of points to numbers that are higher for better points.

    A sampler needs such numbers. The number is the score, with a negative sign if a lower score is
    better. A failed point gets the smallest number among the other points or 0, whichever is
    smaller.
    """
    sign = _sign_of(metric)
    worst = 0.0
    for point in points:
        if not point.failed:
            worst = min(worst, sign * point.score)
    gains = []
    for point in points:
        gain = sign * point.score
        if point.failed:
            gain = worst
        gains.append(gain)
    return gains


def _score_points(
    points: Sequence[Mapping[str, Value]], summaries: Summaries, metric: str
) -> list[Point]:
    """Score each point by the mean of a metric over its runs, and return the scores in order.

    ``summaries`` has the summaries of each point's runs. A point with a failed run is marked as
    failed.
    """
    scored = []
    for settings, runs in zip(points, summaries, strict=True):
        scored.append(_score_point(settings, runs, metric))
    return scored


def _score_point(
    settings: Mapping[str, Value], runs: Sequence[Mapping[str, Any]], metric: str
) -> Point:
    """Score a point (a choice of settings) by the mean of a validation metric over its runs.

    The result also has the standard error of the score, the mean loss and the mean metric of each
    group of sites. The standard error treats the runs as independent. If a run failed, all numbers
    are 0, and ``failed`` has the reason of the first failed run.
    """
    scores, losses, by_run = [], [], []
    digests = ""
    for run in runs:
        if FAILED in run:  # a mean over the other runs would favour points that diverge
            return Point(settings, 0.0, 0.0, 0.0, {}, failed=run[FAILED])
        means = run["validation"]["mean"]
        scores.append(float(means[metric]))
        losses.append(means["loss"])
        by_run.append(run["validation"]["distributions"])
        digests += run["digest"]
    # Standard error over folds and seeds, treated as independent
    error = deviation(scores) / len(scores) ** 0.5
    # Equal only if every run of two points has equal metrics
    digest = hashlib.sha256(digests.encode()).hexdigest()
    return Point(settings, mean(scores), error, mean(losses), _by_site(by_run, metric), digest)


def _by_site(runs: Sequence[Mapping[str, Mapping[str, float]]], metric: str) -> dict[str, float]:
    """Average a metric over runs at each group of sites, and return group -> mean.

    ``runs`` has group -> metric -> value for each run, and the groups are those of the first run.
    Runs that lack the metric at a group are left out of its mean. A group at which no run has the
    metric is missing.
    """
    by_site = {}
    for site in runs[0]:
        values = [run[site][metric] for run in runs if metric in run.get(site, {})]
        if values:
            by_site[site] = mean(values)
    return by_site


def _pieces(budget: Tuning) -> str:
    """Describe how a point is evaluated, for example as "5 folds, 3 seeds".

    With one fold, the text is "the data set's own validation part" in place of the folds.
    """
    folds = "the data set's own validation part"
    if budget.folds > 1:
        folds = f"{budget.folds} folds"
    return f"{folds}, {format_count(budget.seeds, 'seed')}"


def chosen_document(
    plan: Plan, ranked: Sequence[Point], metric: str, sampler: str = "grid"
) -> dict[str, Any]:
    """Build the content of ``chosen.json``, the result of tuning an experiment.

    The keys are:

    - ``experiment``, ``sampler``, ``metric``, ``budget`` and ``grid``: facts of the search
    - ``chosen`` and ``why``: the chosen settings, and the reason as one line
    - ``ranking``: every point with its settings and scores, the best first
    - ``warnings``: chosen values at an end of the grid, settings without effect on any metric, and
      failed points, in this order

    Args:
        plan: the search: experiment, budget and grid.
        ranked: all points, the best one first.
        metric: the metric that decided.
        sampler: ``grid`` or ``tpe``.
    """
    best = ranked[0]
    failed, digests, settings = [], [], []
    for point in ranked:
        digests.append(point.digest)
        settings.append(point.settings)
        if point.failed:
            failed.append(f"point {dict(point.settings)} failed: {point.failed}")
    same = without_effect(digests, settings)
    edges = at_an_edge(plan.grid, best.settings, sampler, plan.rules)
    return {
        "experiment": plan.experiment,
        "chosen": dict(best.settings),
        "why": _explain_choice(plan, ranked, metric),
        "warnings": [*edges, *same, *failed],
        "sampler": sampler,
        "metric": metric,
        "budget": vars(plan.budget),
        "grid": {key: list(values) for key, values in plan.grid.items()},
        "ranking": [vars(point) for point in ranked],
    }


def _explain_choice(plan: Plan, ranked: Sequence[Point], metric: str) -> str:
    """Explain in one line why the first of the ``ranked`` points was chosen.

    The text has the point's score and standard error, and the numbers of points, folds and seeds.
    If another point succeeded, the second-best score follows.
    """
    best = ranked[0]
    score = f"mean validation {metric} over sites"
    if metric == POOLED:
        score = "pooled validation balanced-accuracy"
    why = (
        f"best {score}, {best.score:.4f} (standard error {best.error:.4f}), of "
        f"{format_count(len(ranked), 'point')} on {_pieces(plan.budget)}; no test metric was used"
    )
    # Failed points come last, so if the second one failed, no other is left
    if len(ranked) > 1 and not ranked[1].failed:
        why += f"; the next one has {ranked[1].score:.4f}"
    return why


def _csv(groups: Sequence[Sequence[Trial]], summaries: Summaries, metric: str) -> str:
    """Build the text of ``trials.csv``, which has a row for each run.

    A row begins with the settings of the run's point, the seed and the fold. If the run failed,
    only the reason follows. Otherwise, these columns follow: the deciding metric and the loss with
    all digits, the duration in seconds, the digest over all metrics, and the path of the summary's
    file.
    """
    records = []
    for trial, summary in zip(chain(*groups), chain(*summaries), strict=True):
        cells = dict(trial.label)
        if FAILED in summary:
            cells[FAILED] = summary[FAILED]
        else:
            values = summary["validation"]["mean"]
            cells[metric] = repr(values[metric])  # all digits, so that equal runs are seen
            cells["loss"] = repr(values["loss"])
            cells["seconds"] = summary["seconds"]["total"]
            cells["digest"] = summary["digest"]
            cells["run"] = f"trials/{summary['file']}"
        records.append({key: str(value) for key, value in cells.items()})
    return pd.DataFrame(records).to_csv(index=False, lineterminator="\n")
