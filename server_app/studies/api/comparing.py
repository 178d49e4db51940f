"""Many runs: comparisons over seeds, tuning, cross-validation, and pictures of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Unpack

from fedsilo.models.contract.errors import SettingError
from fedsilo.server_app.run.arguments import Tell, refuse_below, several, silent
from fedsilo.server_app.run.options import (
    AnyEngine,
    ExperimentName,
    ExperimentNames,
    Jobs,
    MeasuredSplit,
    Option,
    Sampler,
    SlurmParameters,
    Sources,
    Supernodes,
    TunedMetric,
    command,
    run_sources,
)

if TYPE_CHECKING:
    from fedsilo.server_app.studies.compare.crossvalidate import CrossValidation
    from fedsilo.server_app.studies.compare.over_seeds import Comparison
    from fedsilo.server_app.studies.compare.tune import Tuned


@command
def compare(
    experiments: ExperimentNames,
    *,
    engine: AnyEngine = "inline",
    supernodes: Supernodes = None,
    seeds: Annotated[int, "number of seeds"] = 3,
    jobs: Jobs = 0,
    slurm: SlurmParameters = (),
    split: Annotated[
        MeasuredSplit, "test data, or val: the validation data, for choosing settings"
    ] = "test",
    own_splits: Annotated[
        bool, Option("give each seed its own split of the data (fold-seed)", name="--splits")
    ] = False,
    metrics: Annotated[
        Sequence[str],
        Option("names or patterns of metrics (default: the data set's)", value="M,..."),
    ] = (),
    tests: Annotated[
        Sequence[str],
        Option("metrics to test for differences between the experiments", value="M,..."),
    ] = (),
    paired: Annotated[bool, "test the differences seed by seed"] = False,
    unequal: Annotated[
        bool, "compare and mark rows that differ in rounds, steps, start or tuning"
    ] = False,
    tell: Tell = silent,
    **sources: Unpack[Sources],
) -> Comparison:
    """Run experiments over seeds and compare them.

    Finished runs in ``<out>/<experiment>-seed<n>`` are used again. The comparison's ``results`` are
    a frame with a row per experiment, group, metric and seed; ``tested`` has the tests, and
    ``budgets`` the rounds, steps, samples, bytes and seconds of each row.
    """
    from fedsilo.server_app.studies.compare.over_seeds import compare
    from fedsilo.server_app.studies.compare.slurm import read_jobs

    refuse_below(1, "seeds", seeds)
    return compare(
        _named(experiments),
        run_sources(sources),
        engine=engine,
        supernodes=supernodes,
        seeds=seeds,
        own_splits=own_splits,
        split=split,
        metrics=",".join(several(metrics)) or None,
        tests=",".join(several(tests)) or None,
        paired=paired,
        unequal=unequal,
        jobs=read_jobs(str(jobs), several(slurm)),
        tell=tell,
    )


@command
def tune(
    experiment: ExperimentName,
    *,
    sampler: Annotated[
        Sampler, "grid draws points of the grid; tpe searches the ranges that the grid spans"
    ] = "grid",
    metric: Annotated[
        TunedMetric | None,
        "the deciding metric: a mean over the sites that have it, or pooled over all validation "
        "samples (default: the first of the data set's headline metrics)",
    ] = None,
    trials: Annotated[
        int | None, "points to try, for all methods (default: the simulation file's)"
    ] = None,
    folds: Annotated[
        int | None,
        "validation folds for each seed (default: the simulation file's); 1 for a data set with "
        "its own validation part",
    ] = None,
    seeds: Annotated[int | None, "seeds for each point (default: the simulation file's)"] = None,
    jobs: Jobs = 0,
    slurm: SlurmParameters = (),
    tell: Tell = silent,
    **sources: Unpack[Sources],
) -> Tuned:
    """Choose an experiment's settings by validation on its training data."""
    from fedsilo.server_app.studies.compare.slurm import read_jobs
    from fedsilo.server_app.studies.compare.tune import tune

    budget = {"trials": trials, "folds": folds, "seeds": seeds}
    for option, number in budget.items():
        refuse_below(1, option, number)
    return tune(
        experiment,
        run_sources(sources),
        sampler=sampler,
        metric=metric,
        jobs=read_jobs(str(jobs), several(slurm)),
        tell=tell,
        **budget,
    )


@command
def crossvalidate(
    experiments: ExperimentNames,
    *,
    folds: Annotated[int, "folds of each site"] = 5,
    repeats: Annotated[int, "number of repetitions, each with its own folds"] = 5,
    unequal: Annotated[
        bool, "compare and mark experiments that differ in rounds, start or tuning"
    ] = False,
    jobs: Jobs = 0,
    slurm: SlurmParameters = (),
    tell: Tell = silent,
    **sources: Unpack[Sources],
) -> CrossValidation:
    """Repeat cross-validation within each site."""
    from fedsilo.server_app.studies.compare.crossvalidate import crossvalidate
    from fedsilo.server_app.studies.compare.slurm import read_jobs

    refuse_below(2, "folds", folds)
    refuse_below(1, "repeats", repeats)
    return crossvalidate(
        _named(experiments),
        run_sources(sources),
        folds=folds,
        repeats=repeats,
        unequal=unequal,
        jobs=read_jobs(str(jobs), several(slurm)),
        tell=tell,
    )


def _named(experiments: Sequence[str]) -> list[str]:
    names = several(experiments)
    if not names:
        raise SettingError("no experiment is named: name at least one experiment")
    return names
