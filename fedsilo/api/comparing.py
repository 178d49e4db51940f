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

    The seeds are 0 to ``seeds - 1``. Finished runs are not repeated, and interrupted runs are
    resumed. Unless ``unequal`` is set, experiments on one data set must have equal training
    budgets.

    Returns:
        The comparison, with the results, the tested differences and the budgets.

    Raises:
        FedsiloError: an argument is wrong, budgets are unequal, or a run failed.
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

    A line per run has its directory and whether it is to be run, to be resumed, or finished. If an
    experiment has not begun, its plan and cost come first. The arguments are those of ``compare``.

    Raises:
        FedsiloError: the comparison could not begin.
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

    The simulation file lists values to try. A point is a choice of values, and is trained for every
    validation fold and seed. The point with the best metric is chosen.

    Returns:
        The points, best first, the chosen settings, and the folder.

    Raises:
        FedsiloError: the experiment or an argument cannot be used.
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

    Each repetition cuts every site's data into new folds, the same for all experiments. Unless
    ``unequal`` is set, the training budgets must be equal.

    Returns:
        The intervals of each metric and of its differences from the first experiment, and the
        budgets.

    Raises:
        FedsiloError: an argument is wrong, budgets are unequal, or a run failed.
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
