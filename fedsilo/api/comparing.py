"""Many runs: comparisons over seeds, tuning, cross-validation, and pictures of finished runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

from fedsilo.api import options
from fedsilo.core.arguments import Tell, refuse_below, several, silent
from fedsilo.core.errors import SettingError
from fedsilo.core.one_line import as_word, format_count

if TYPE_CHECKING:
    from fedsilo.comparison.crossvalidate import CrossValidation
    from fedsilo.comparison.jobs import Job
    from fedsilo.comparison.over_seeds import Comparison
    from fedsilo.comparison.tune import Tuned


ComparedSplit = Annotated[
    options.MeasuredSplit, "test data, or val: the validation data, for choosing settings"
]
OwnSplits = Annotated[
    bool, options.Option("give each seed its own split of the data (fold-seed)", name="--splits")
]
ShownMetrics = Annotated[
    Sequence[str],
    options.Option("names or patterns of metrics (default: the data set's)", value="M,..."),
]
TestedMetrics = Annotated[
    Sequence[str],
    options.Option("metrics to test for differences between the experiments", value="M,..."),
]


@options.command
def compare(
    experiments: options.ExperimentNames,
    *,
    engine: options.AnyEngine = "inline",
    supernodes: options.Supernodes = None,
    seeds: Annotated[int, "number of seeds"] = 3,
    jobs: options.Jobs = 0,
    slurm: options.SlurmParameters = (),
    split: ComparedSplit = "test",
    own_splits: OwnSplits = False,
    metrics: ShownMetrics = (),
    tests: TestedMetrics = (),
    paired: Annotated[bool, "test the differences seed by seed"] = False,
    unequal: Annotated[
        bool, "compare and mark rows that differ in rounds, steps, start or tuning"
    ] = False,
    no_floor: Annotated[
        bool, "also compare values that rest on fewer samples than 'privacy.sums-min-count'"
    ] = False,
    tell: Tell = silent,
    **sources: Unpack[options.Sources],
) -> Comparison:
    """Run experiments over seeds and compare them.

    The seeds are 0 to ``seeds - 1``, and a run's directory is ``<out>/<experiment>-seed<n>``. With
    ``own_splits``, each seed also has its own split of the data, and the name ends in
    ``-split<n>``. Finished runs are not repeated, and interrupted runs are resumed. Unless
    ``unequal`` is set, experiments on the same data set must have equal rounds, optimiser steps,
    networks, initial weights and tuning.

    Returns:
        The comparison. ``results`` is a data frame with a row per experiment, group of sites,
        metric and seed. ``tested`` has the tests of differences. ``budgets`` has the rounds, steps,
        samples, bytes and seconds of each experiment.

    Raises:
        FedsiloError: an argument or setting is wrong, the experiments' budgets are unequal, or a
            run failed. Also raised if some methods keep the optimiser's state over rounds and
            others restart it.
    """
    from fedsilo.comparison import over_seeds as study
    from fedsilo.comparison.jobs import run_all, runs_of
    from fedsilo.comparison.slurm import read_jobs

    shown, tested = ",".join(several(metrics)) or None, ",".join(several(tests)) or None
    at_once = read_jobs(str(jobs), several(slurm))
    planned = _plan_jobs(experiments, seeds, engine, supernodes, own_splits, sources)
    study.check_jobs(planned, shown, tested, paired, seeds)
    budgets = study.plan_budgets(planned, options.run_sources(sources))
    if not unequal:
        budgets.refuse_unequal("give all the same budget, or mark the row by --unequal")
    if own_splits:
        study.refuse_one_split(planned)
    # Only missing runs are started, so an interrupted comparison can be repeated
    unfinished = [job for job in planned if not job.is_finished()]
    if unfinished:
        study.refuse_without(split, unfinished, no_floor)
    run_all(unfinished, at_once, tell)
    # Steps, bytes and seconds are known only now: a run may have ended early
    budgets = budgets.with_costs(runs_of(planned))
    if not unequal:
        budgets.refuse_unequal("all runs are kept; repeat with --unequal to mark the row")
    return study.compare_runs(planned, split, shown, tested, paired, budgets, no_floor)


def _plan_jobs(
    experiments: Sequence[str],
    seeds: int,
    engine: str,
    supernodes: int | None,
    own_splits: bool,
    sources: options.Sources,
) -> list[Job]:
    """Plan a run for each experiment and each seed, experiment by experiment.

    The arguments are those of ``compare``. Seeds are 0 to ``seeds`` - 1. Nothing is run.

    Raises:
        SettingError: no experiment is named, ``seeds`` is below 1, or a setting is wrong.
    """
    from fedsilo.comparison.jobs import plan_job

    refuse_below(1, "seeds", seeds)
    names, given = _read_names(experiments), options.run_sources(sources)
    # All runs are planned, and their settings compared, before the first run starts
    planned = []
    for name in names:
        for number in range(seeds):
            planned.append(plan_job(name, number, given, engine, supernodes, own_splits))
    return planned


def plan_comparison(
    experiments: Sequence[str],
    *,
    engine: str = "inline",
    supernodes: int | None = None,
    seeds: int = 3,
    own_splits: bool = False,
    tests: Sequence[str] = (),
    paired: bool = False,
    unequal: bool = False,
    **sources: Unpack[options.Sources],
) -> Iterator[str]:
    """Yield the lines of ``compare --dry-run``, which describe a comparison without running it.

    Each run has a line with its directory and its state: to be run, to be resumed, or finished. If
    an experiment's run of seed 0 has not begun, three lines come before the run's line: its plan,
    its cost and its directory. The last two lines give the number of runs to do and say that
    nothing was run.

    The arguments are those of ``compare``.

    Raises:
        FedsiloError: the comparison could not begin. Whether the sites have enough samples to
            compare is not checked here.
    """
    from fedsilo.comparison import over_seeds as study
    from fedsilo.engines.dry_run import NOTHING_RUN, describe_run

    planned = _plan_jobs(experiments, seeds, engine, supernodes, own_splits, sources)
    study.check_jobs(planned, None, ",".join(several(tests)) or None, paired, seeds)
    if not unequal:
        budgets = study.plan_budgets(planned, options.run_sources(sources))
        budgets.refuse_unequal("give all the same budget, or mark the row by --unequal")
    if own_splits:
        study.refuse_one_split(planned)
    missing = 0
    for job in planned:
        state = "finished, is used again"
        if not job.is_finished():
            missing += 1
            state = "to be run"
            if job.directory.path.is_dir():
                state = "to be resumed"
        # The runs of an experiment differ only in their seed, so the first one stands for all
        if job.settings.common.seed == 0 and state == "to be run":
            yield from describe_run(job.settings, job.resources, engine)
        yield f"{as_word(job.directory.path)}: {state}"
    yield f"{missing} of {format_count(len(planned), 'run')} to do"
    yield NOTHING_RUN


@options.command
def tune(
    experiment: options.ExperimentName,
    *,
    sampler: Annotated[
        options.Sampler,
        "grid draws points of the grid; tpe searches the ranges that the grid spans",
    ] = "grid",
    metric: Annotated[
        options.TunedMetric | None,
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
    jobs: options.Jobs = 0,
    slurm: options.SlurmParameters = (),
    tell: Tell = silent,
    **sources: Unpack[options.Sources],
) -> Tuned:
    """Choose an experiment's settings by validation on its training data.

    The simulation file has the experiment's grid: the values to try for each setting. A point is
    one combination of values. Each point is trained for every validation fold and seed, and the
    point with the best metric is chosen. Test data are not used. All trials are written to
    ``<out>/tune-<experiment>``, and finished trials there are not repeated.

    Returns:
        The points, best first, the chosen settings with their reason (the content of
        ``chosen.json``), and the folder.

    Raises:
        FedsiloError: the experiment, the grid or the metric cannot be used, or a number is below 1.
    """
    from fedsilo.comparison.slurm import read_jobs
    from fedsilo.comparison.tune import plan_search, search

    budget = {"trials": trials, "folds": folds, "seeds": seeds}
    for option, number in budget.items():
        refuse_below(1, option, number)
    at_once = read_jobs(str(jobs), several(slurm))
    plan = plan_search(experiment, options.run_sources(sources), sampler, budget)
    return search(plan, sampler, metric, at_once, tell)


@options.command
def crossvalidate(
    experiments: options.ExperimentNames,
    *,
    folds: Annotated[int, "folds of each site"] = 5,
    repeats: Annotated[int, "number of repetitions, each with its own folds"] = 5,
    unequal: Annotated[
        bool, "compare and mark experiments that differ in rounds, start or tuning"
    ] = False,
    jobs: options.Jobs = 0,
    slurm: options.SlurmParameters = (),
    tell: Tell = silent,
    **sources: Unpack[options.Sources],
) -> CrossValidation:
    """Compare experiments by repeated cross-validation within each site.

    Each repetition cuts every site's data into new folds, the same for all experiments. Every other
    experiment is compared with the first. Unless ``unequal`` is set, all experiments must have
    equal training settings, networks, initial weights, tuning and numbers of finished rounds. A
    finished run is not repeated.

    Returns:
        The confidence intervals of each metric and of its difference from the first experiment, and
        the budgets.

    Raises:
        FedsiloError: an experiment is unknown, its data cannot be cut, ``folds`` is below 2,
            ``repeats`` is below 1, the budgets are unequal, or a run failed. Also raised if some
            methods keep the optimiser's state over rounds and others restart it.
    """
    from fedsilo.comparison import budgets as compared
    from fedsilo.comparison import crossvalidate as study
    from fedsilo.comparison.slurm import read_jobs
    from fedsilo.datasets.registry import shown_metrics
    from fedsilo.engines.planning import plan_run

    refuse_below(2, "folds", folds)
    refuse_below(1, "repeats", repeats)
    given, at_once = options.run_sources(sources), read_jobs(str(jobs), several(slurm))
    plans = {name: plan_run(name, given)[0] for name in _read_names(experiments)}
    commons = {name: settings.common for name, settings in plans.items()}
    # plan_folds refuses experiments on other data, so the first one's data set stands for all
    first, *_ = commons.values()
    compared.refuse_mixed_optimisers(commons)
    planned = study.plan_folds(plans, folds, repeats)
    experiments = format_count(len(plans), "experiment")
    what = f"{experiments}, {folds} folds, {format_count(repeats, 'repeat')}"
    tell(f"{what}: {format_count(len(plans) * folds * repeats, 'run')}")
    # Settings are compared before the runs. Finished rounds are compared after them, because early
    # stopping may have ended some runs
    budgets = compared.planned_budgets(plans, given)
    if not unequal:
        budgets.refuse_unequal("give all the same budget, or mark the row by --unequal")
    summaries = study.run_folds(planned, Path(first.out), at_once)
    rounds = {name: [int(run["rounds"]) for run in runs] for name, runs in summaries.items()}
    budgets = budgets.with_rounds(rounds)
    if not unequal:
        budgets.refuse_unequal("all runs are kept; repeat with --unequal to mark the row")
    return study.compare_folds(summaries, shown_metrics(first.dataset, first.task), folds, budgets)


def _read_names(experiments: Sequence[str]) -> list[str]:
    """Return the names of the experiments in the given order, each once.

    Raises:
        SettingError: no experiment is named.
    """
    # Keys of a dictionary are unique and keep their order
    names = list(dict.fromkeys(several(experiments)))
    if not names:
        raise SettingError("no experiment is named: name at least one experiment")
    return names
