"""Many runs: comparisons over seeds, tuning, cross-validation, and pictures of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from fedsilo.server_app.run.arguments import (
    Engine,
    MeasuredSplit,
    Sampler,
    Sources,
    Tell,
    TunedMetric,
    refuse_below,
    run_sources,
    several,
    silent,
)

if TYPE_CHECKING:
    from fedsilo.server_app.studies.compare.crossvalidate import CrossValidation
    from fedsilo.server_app.studies.compare.over_seeds import Comparison
    from fedsilo.server_app.studies.compare.tune import Tuned


def compare(
    experiments: Sequence[str],
    *,
    engine: Engine = "inline",
    supernodes: int | None = None,
    seeds: int = 3,
    jobs: int | str = 0,
    slurm: Sequence[str] = (),
    split: MeasuredSplit = "test",
    own_splits: bool = False,
    metrics: Sequence[str] = (),
    tests: Sequence[str] = (),
    paired: bool = False,
    unequal: bool = False,
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
        several(experiments),
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


def tune(
    experiment: str,
    *,
    sampler: Sampler = "grid",
    metric: TunedMetric | None = None,
    trials: int | None = None,
    folds: int | None = None,
    seeds: int | None = None,
    jobs: int | str = 0,
    slurm: Sequence[str] = (),
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


def crossvalidate(
    experiments: Sequence[str],
    *,
    folds: int = 5,
    repeats: int = 5,
    unequal: bool = False,
    jobs: int | str = 0,
    slurm: Sequence[str] = (),
    tell: Tell = silent,
    **sources: Unpack[Sources],
) -> CrossValidation:
    """Repeat cross-validation within each site."""
    from fedsilo.server_app.studies.compare.crossvalidate import crossvalidate
    from fedsilo.server_app.studies.compare.slurm import read_jobs

    refuse_below(2, "folds", folds)
    refuse_below(1, "repeats", repeats)
    return crossvalidate(
        several(experiments),
        run_sources(sources),
        folds=folds,
        repeats=repeats,
        unequal=unequal,
        jobs=read_jobs(str(jobs), several(slurm)),
        tell=tell,
    )
