"""``fedsilo tune``: choose an experiment's settings on validation folds of the training data.

simulation.yaml declares the grid with the experiment and, once for all, the budget: how many points
are tried, on how many folds, how often. scikit-learn draws the points. Where sites are cut into
folds no trial reads a test row; a data set with a validation part of its own has no folds, and its
test figures go unused. What decides is the first of the data set's headline metrics that all runs
have.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.datasets.registry import data_fingerprint, data_set
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings_schema import Value, setting
from fedsilo.server_app.config.experiments import (
    find_experiment,
    read_section,
    simulation_file,
)
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.run.arguments import RunSources
from fedsilo.server_app.run.planning import planned
from fedsilo.server_app.studies.compare.slurm import Jobs
from fedsilo.server_app.studies.compare.tables import deviation, mean, rich_table
from fedsilo.server_app.studies.compare.trials import Trial, run_groups

SHOWN = 5  # points in the table on the screen


@dataclass(frozen=True)
class Tuning:
    """The budget of tuning, the same for every experiment: 'tuning' in simulation.yaml."""

    trials: int = setting(16, "points of the grid that are tried", minimum=1)
    folds: int = setting(5, "validation folds of the training data", minimum=2)
    seeds: int = setting(3, "seeds, each with another shuffling into folds", minimum=1)


@dataclass(frozen=True)
class Point:
    """A point of the grid and what it reached on the folds of all seeds.

    Attributes:
        settings: the values that were tried.
        score: mean over sites, folds and seeds of the metric that decides.
        error: its standard error over folds and seeds.
        loss: mean validation loss, which decides between equals.
        sites: each site's own score.
    """

    settings: Mapping[str, Value]
    score: float
    error: float
    loss: float
    sites: Mapping[str, float]


@dataclass(frozen=True)
class Tuned:
    """What a search found: its points, best first, the content of chosen.json, and its folder."""

    metric: str
    ranked: Sequence[Point]
    document: Mapping[str, Any]
    folder: Path

    def lines(self) -> Iterator[Table | str]:
        """Yield the table of the best points, why the first was chosen, and its settings."""
        chosen = ", ".join(f"{k}: {json.dumps(v)}" for k, v in self.ranked[0].settings.items())
        yield ranking_table(self)
        yield str(self.document["why"])
        yield f"for simulation.yaml: {{{chosen}}}"
        yield f"written to {self.folder}"


def tune(
    experiment: str,
    sources: RunSources,
    *,
    trials: int | None = None,
    folds: int | None = None,
    seeds: int | None = None,
    jobs: Jobs = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> Tuned:
    """Try the grid, choose, and write the choice and all trials to the run folder.

    Args:
        experiment: its name; the simulation file declares its grid.
        sources: where settings come from, over the experiment's.
        trials: points of the grid that are tried, or None for the simulation file's number.
        folds: of each seed's shuffling, at least 2, or None likewise.
        seeds: of each point, or None likewise. chosen.json has all three.
        jobs: runs at once, 0 for one per core, or Slurm's parameters.
        tell: is called with a line before the runs begin.

    Raises:
        FedsiloError: there is no grid, a setting is wrong, or a run failed.
    """
    file = simulation_file(sources.file)
    budget = _budget(file, trials, folds, seeds)
    grid = find_experiment(file, experiment).grid
    points = grid_points(grid, budget, experiment)
    base, _ = planned(experiment, sources)
    folder = Path(base.common.out) / f"tune-{experiment}"
    if "val-folds" not in data_set(base.common.dataset).settings:
        budget = replace(budget, folds=1)
    if twice := [text for text in sources.changes if text.partition("=")[0].strip() in grid]:
        raise SettingError(f"--set {', '.join(twice)}: the grid of this experiment decides that")
    data = data_fingerprint(base.common)
    groups = [_trials(base.as_mapping(), point, budget, data) for point in points]
    tell(
        f"{experiment}: {len(points)} points, {_pieces(budget)}: "
        f"{sum(map(len, groups))} runs on training data"
    )
    summaries = run_groups(groups, folder / "trials", jobs)
    metric = deciding_metric(data_set(base.common.dataset).headline, summaries)
    ranked = ranking(points, summaries, metric)
    write_atomically(folder / "trials.csv", _csv(groups, summaries, metric))
    document = chosen_document(experiment, budget, grid, ranked, metric)
    write_atomically(folder / "chosen.json", json.dumps(document, indent=2) + "\n")
    return Tuned(metric, ranked, document, folder)


def _budget(file: Path, trials: int | None, folds: int | None, seeds: int | None) -> Tuning:
    given = {"trials": trials, "folds": folds, "seeds": seeds}
    budget = read_section(file, "tuning", Tuning)
    return replace(budget, **{key: value for key, value in given.items() if value is not None})


def grid_points(
    grid: Mapping[str, Sequence[Value]], budget: Tuning, experiment: str
) -> list[dict[str, Value]]:
    """Return as many points of ``grid`` as the budget has trials, the same each time.

    Raises:
        SettingError: there is no grid, or it has fewer points: the budget is the same for all.
    """
    from sklearn.model_selection import ParameterGrid, ParameterSampler

    size = len(ParameterGrid(dict(grid))) if grid else 0
    if size < budget.trials:
        raise SettingError(
            f"experiment '{experiment}' declares a grid of {size} points, and every experiment is "
            f"tried at {budget.trials} (--trials, or 'trials' under 'tuning'): widen its 'grid'"
        )
    sampled = ParameterSampler(dict(grid), budget.trials, random_state=0)
    return [{key: point[key] for key in grid} for point in sampled]


def _trials(
    base: Mapping[str, Value], point: Mapping[str, Value], budget: Tuning, data: str
) -> list[Trial]:
    """Return the runs of one point: every fold of every seed's shuffling."""
    trials = []
    for seed, fold in product(range(budget.seeds), range(budget.folds)):
        folds = {"val-folds": budget.folds, "val-fold": fold, "fold-seed": seed, "use-test": False}
        cut = folds if budget.folds > 1 else {}
        values = {**base, **point, **cut, "seed": seed, "evaluate-every": 0, "run-name": ""}
        try:
            trials.append(Trial(resolve(values), {**point, "seed": seed, "fold": fold}, data))
        except SettingError as error:
            raise SettingError(f"grid point {dict(point)}: {error}") from None
    return trials


def deciding_metric(
    headline: Sequence[str], summaries: Sequence[Sequence[Mapping[str, Any]]]
) -> str:
    """Return the first of ``headline`` that every run has: a fold of one class has no AUC."""
    means = [summary["validation"]["mean"] for runs in summaries for summary in runs]
    return next(
        (metric for metric in headline if all(metric in figures for figures in means)), "accuracy"
    )


def ranking(
    points: Sequence[Mapping[str, Value]],
    summaries: Sequence[Sequence[Mapping[str, Any]]],
    metric: str,
) -> list[Point]:
    """Return the points, best first: by mean score over sites, equals by loss.

    Args:
        points: of the grid.
        summaries: for each point, those of its runs.
        metric: whose validation figures are the scores, of the data set's headline the first.
    """
    ranked = []
    for settings, runs in zip(points, summaries, strict=True):
        means = [summary["validation"]["mean"] for summary in runs]
        scores = [float(figures[metric]) for figures in means]
        error, loss = deviation(scores) / len(scores) ** 0.5, mean(f["loss"] for f in means)
        by_site = _by_site([summary["validation"]["distributions"] for summary in runs], metric)
        ranked.append(Point(settings, mean(scores), error, loss, by_site))
    return sorted(ranked, key=lambda point: (-round(point.score, 6), point.loss))


def _by_site(runs: Sequence[Mapping[str, Mapping[str, float]]], metric: str) -> dict[str, float]:
    by_site = {
        site: [run[site][metric] for run in runs if metric in run.get(site, {})] for site in runs[0]
    }
    return {site: mean(values) for site, values in by_site.items() if values}


def _pieces(budget: Tuning) -> str:
    folds = f"{budget.folds} folds" if budget.folds > 1 else "the data set's own validation part"
    return f"{folds}, {budget.seeds} seeds"


def chosen_document(
    experiment: str,
    budget: Tuning,
    grid: Mapping[str, Sequence[Value]],
    ranked: Sequence[Point],
    metric: str,
) -> dict[str, Any]:
    """Return chosen.json: what was chosen, why, and what else was tried."""
    best, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    why = (
        f"best mean validation {metric} over sites, {best.score:.4f} (standard error "
        f"{best.error:.4f}), of {len(ranked)} points on {_pieces(budget)}; no test figure was used"
    )
    if second is not None:
        why += f"; the next one has {second.score:.4f}"
    return {
        "experiment": experiment,
        "chosen": dict(best.settings),
        "why": why,
        "metric": metric,
        "budget": vars(budget),
        "grid": {key: list(values) for key, values in grid.items()},
        "ranking": [vars(point) for point in ranked],
    }


def ranking_table(tuned: Tuned) -> Table:
    """Return the best points for a terminal."""
    best = tuned.ranked[:SHOWN]
    lines = [[*best[0].settings, f"val {tuned.metric}", "val loss"]]
    for point in best:
        figures = (f"{point.score:.4f} ± {point.error:.4f}", f"{point.loss:.4f}")
        lines.append([*map(str, point.settings.values()), *figures])
    return rich_table(f"the best {len(best)} points", lines, left=0)


def _csv(
    groups: Sequence[Sequence[Trial]],
    summaries: Sequence[Sequence[Mapping[str, Any]]],
    metric: str,
) -> str:
    """Return every trial's label and figures as CSV, the figures with all their digits."""
    records = []
    for trial, summary in zip(chain(*groups), chain(*summaries), strict=True):
        figures = summary["validation"]["mean"]
        cells = dict(trial.label) | {key: repr(figures[key]) for key in (metric, "loss")}
        records.append({key: str(value) for key, value in cells.items()})
    return pd.DataFrame(records).to_csv(index=False, lineterminator="\n")
