"""``fedsilo compare``: means and deviations of experiments over seeds, with published numbers.

``jobs.py`` plans and runs the runs. This file checks before them that they can be compared, and
compares them afterwards.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from fedsilo.comparison.budgets import Budgets, planned_budgets, refuse_mixed_optimisers
from fedsilo.comparison.jobs import Job, runs_of
from fedsilo.comparison.latex import latex_text
from fedsilo.comparison.results import (
    chosen_metrics,
    constant_results,
    experiment_results,
    refuse_unmeasured,
    shared_metrics,
    summaries_by_seed,
    values_by_seed,
)
from fedsilo.comparison.significance import (
    Tested,
    check_tests,
    lines_of_tests,
    markdown_tests,
    notes,
    significance,
    significance_csv,
)
from fedsilo.comparison.tables import (
    comparison_lines,
    comparison_table,
    csv_text,
    draw_comparison,
    json_records,
    markdown_table,
    over_seeds,
    rich_table,
)
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.methods import METHODS
from fedsilo.core.settings.common_settings import SERVER, CommonSettings
from fedsilo.datasets.registry import load_silo, shown_metrics, silo_names
from fedsilo.pages.notebook import html_of_lines
from fedsilo.pictures.picture_files import write_picture
from fedsilo.runs.finished_run import FinishedRun, same_split
from fedsilo.server_app.records.partial_means import (
    Summary,
    describe_hidden,
    describe_partial_means,
    find_hidden,
)

# experiment -> seed -> summary of the split
Summaries = Mapping[str, Mapping[int, Summary]]


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    ``results`` is a tidy table (see tables.py), ``tested`` has the tests of differences, and
    ``notes`` has the remarks on the results and tests. ``budgets`` has the budget of each
    experiment.
    """

    results: pd.DataFrame
    split: str
    tested: Sequence[Tested] = ()
    notes: Sequence[str] = ()
    budgets: Budgets = field(default_factory=Budgets)

    def lines(self, median: bool = False) -> Iterator[Table | str]:
        """Describe the comparison for a terminal.

        Args:
            median: whether to show median and range over seeds in place of mean and deviation.

        Yields:
            A table of the results, in which experiments with unequal budgets are marked. Then come
            a table of the budgets, the tests, and the remarks.
        """
        yield comparison_table(self.budgets.mark_unequal(self.results), self.split, median)
        yield rich_table(self.budgets.title(), self.budgets.lines())
        yield from lines_of_tests(self.tested, self.split, self.notes)

    def _repr_html_(self) -> str:
        """Show the comparison in a notebook: the terminal's tables and remarks as HTML."""
        return html_of_lines(self.lines())

    def draw(self, path: Path) -> None:
        """Draw the means over seeds as a bar chart, and write it to a picture file.

        Each metric has a panel, with a bar for each experiment at each group of sites.

        Raises:
            SettingError: ``path`` does not end with .png, .svg or .pdf.
        """
        write_picture(path, draw_comparison(self.results, self.split))

    def markdown(self, median: bool = False) -> str:
        """Build the tables of results and budgets, the tests and the remarks as Markdown."""
        lines = comparison_lines(self.budgets.mark_unequal(self.results), self.split, median)
        text = f"{markdown_table(lines)}\n{self.budgets.title()}\n\n"
        text += markdown_table(self.budgets.lines())
        return text + markdown_tests(self.tested, self.split, self.notes)

    def document(self) -> dict[str, Any]:
        """Return the comparison as a dictionary for JSON.

        The keys are ``split``, ``results`` (over seeds), ``budgets``, ``tests`` and ``notes`` (the
        remarks).
        """
        tests: list[dict[str, Any]] = []
        for test in self.tested:
            tests += test.records()
        return {
            "split": self.split,
            "results": json_records(over_seeds(self.results)),
            "budgets": json_records(self.budgets.frame()),
            "tests": json_records(pd.DataFrame(tests)),
            "notes": list(self.notes),
        }

    def latex(self, median: bool = False) -> str:
        """Build the tables of results and tests as LaTeX.

        With ``median``, the tables show median and range over seeds in place of mean and deviation.

        Raises:
            SettingError: no metric has values of two experiments at the same group of sites.
        """
        return latex_text(self.results, self.split, self.tested, self.budgets, median)

    def write(
        self,
        csv: Path | None = None,
        markdown: Path | None = None,
        median: bool = False,
        *,
        latex: Path | None = None,
    ) -> None:
        """Write the comparison to files.

        A path that is None is skipped. Existing files are replaced.

        Args:
            csv: the file for the results over seeds. For ``results.csv``, the budgets are written
                to ``results-budgets.csv`` beside it. If there are tests, they are in
                ``results-tests.csv``.
            markdown: the file for all tables as Markdown.
            median: for Markdown and LaTeX, whether to show median and range in place of mean and
                deviation.
            latex: the file for all tables as LaTeX.

        Raises:
            SettingError: ``latex`` is given, but no metric has values of two experiments at the
                same group of sites.
        """
        if csv:
            texts = {
                "": csv_text(over_seeds(self.results)),
                "-budgets": csv_text(self.budgets.frame()),
            }
            if self.tested:
                texts["-tests"] = significance_csv(self.tested)
            for name, text in texts.items():
                write_atomically(csv.with_name(f"{csv.stem}{name}{csv.suffix}"), text)
        if markdown:
            write_atomically(markdown, self.markdown(median))
        if latex:
            write_atomically(latex, self.latex(median))


def check_jobs(
    jobs: Sequence[Job], metrics: str | None, tests: str | None, paired: bool, seeds: int
) -> None:
    """Check before any run that the planned runs can be compared and tested.

    Args:
        jobs: the planned runs. If the method of any run is a plugin, metric names are not checked.
        metrics: names and patterns of metrics, separated by commas. None for the headline metrics.
        tests: names and patterns of metrics to test. None for no tests.
        paired: whether the tests compare seed by seed.
        seeds: the number of seeds.

    Raises:
        SettingError: some methods keep the optimiser's state over rounds and others do not, a
            metric is unknown, or ``paired`` is set without tests. Also raised if tests are wanted
            for a single experiment, a single seed, or several data sets.
    """
    if all(job.settings.common.method in METHODS for job in jobs):  # a plugin may measure anything
        for wanted, option in ((metrics, "--metrics"), (tests, "--tests")):
            if wanted:
                refuse_unmeasured(wanted, option)
    commons = {job.experiment: job.settings.common for job in jobs}
    data_sets = {name: common.dataset for name, common in commons.items()}
    refuse_mixed_optimisers(commons)
    check_tests(data_sets, tests=tests, paired=paired, seeds=seeds)


def plan_budgets(jobs: Sequence[Job], sources: RunSources) -> Budgets:
    """Build the budget of each experiment in ``jobs`` before any run, by ``planned_budgets``."""
    return planned_budgets({job.experiment: job.settings for job in jobs}, sources)


def compare_runs(
    jobs: Sequence[Job],
    split: str,
    metrics: str | None,
    tests: str | None,
    paired: bool,
    budgets: Budgets,
    no_floor: bool = False,
) -> Comparison:
    """Compare finished runs: collect their metrics, test differences, and add remarks.

    Means over sites cover only sites at which all runs have the metric. If ``no_floor`` is False,
    values over fewer samples than the setting 'privacy.sums-min-count' are left out, also from the
    means.

    Args:
        jobs: the runs, which have ended.
        split: ``test`` or ``val``.
        metrics: names and patterns, separated by commas. None for the data set's headline metrics.
        tests: names and patterns of metrics to test for differences. None for no tests.
        paired: whether to test the differences seed by seed.
        budgets: the budget of each experiment, with the costs of its runs.
        no_floor: whether to compare all metrics, regardless of the number of samples.

    Raises:
        SettingError: no metric may be shown, a name matches no metric, or ``paired`` is set and the
            experiments have values for different seeds.
    """
    whole = [job.directory for job in jobs]
    runs: Sequence[FinishedRun] = whole
    if not no_floor:
        runs = [run.shown() for run in whole]
    summaries = summaries_by_seed([job.experiment for job in jobs], runs, split)
    every: list[Summary] = []
    for by_seed in summaries.values():
        every += by_seed.values()
    if not any(summary["mean"] for summary in every):
        too_few = any(run.last_metrics(split) for run in whole)
        raise _nothing_to_compare(split, too_few=too_few)
    measured: set[str] = set()
    for run in whole:
        for by_name in run.last_metrics(split).values():
            measured.update(by_name)
    results = _results(jobs, runs, summaries, split, metrics, measured)
    compared = list(results["metric"].unique())
    remarks = describe_partial_means(every, compared)
    remarks += _left_out(runs, split)
    remarks += _explain_hidden(runs, split, compared)
    tested = []
    if tests:
        for metric in chosen_metrics(tests, every, "--tests", measured):
            tested.append(significance(metric, values_by_seed(summaries, metric), paired))
    if tested:
        # The remarks are the same for all metrics, so the first one's tests suffice
        seeds = len({job.settings.common.seed for job in jobs})
        remarks += notes(tested[0], seeds, paired, _have_one_split(jobs))
    return Comparison(results, split, tested, remarks, budgets)


def _have_one_split(jobs: Sequence[Job]) -> bool | None:
    """Tell whether, in each experiment, all seeds have the same sites and samples in each split.

    Experiments are not compared with each other, because they may have different data. The result
    is True only if every experiment passes. If a site in any run did not send the fingerprints
    (hashes) of its samples, the result is None, even if other splits differ.
    """
    answers = [same_split(runs) for runs in runs_of(jobs).values()]
    if None in answers:
        return None
    return all(answers)


def _nothing_to_compare(split: str, *, too_few: bool) -> SettingError:
    """Build the error that says why no metric of ``split`` can be compared.

    If ``too_few`` is True, the sites have samples in the split, but too few to show a metric. If it
    is False, no site has samples in the split.
    """
    if too_few:
        return SettingError(
            f"each site has fewer {split} samples than 'privacy.sums-min-count', so no metric may "
            "be shown: give --no-floor if you may see them"
        )
    return SettingError(
        f"no site has {split} samples, so there is nothing to compare: set 'split.val-folds', or "
        "use 'fedsilo tune'"
    )


def _explain_hidden(runs: Sequence[FinishedRun], split: str, metrics: Sequence[str]) -> list[str]:
    """Build sentences that name the metrics hidden at some sites.

    A metric is hidden if it rests on too few samples, would reveal a hidden value, or may not be
    sent at the level of trust. Metrics that are hidden at the same sites share a sentence, which
    gives the possible reasons. A last sentence names the option ``--no-floor``, which shows all
    values. If the ``runs`` hide none of ``metrics``, the list is empty.
    """
    sites_of: dict[str, dict[str, None]] = {}
    for run in runs:
        if run.whole:
            every, shown = run.whole.last_metrics(split), run.last_metrics(split)
            for metric, sites in find_hidden(every, shown, metrics).items():
                sites_of.setdefault(metric, {}).update(dict.fromkeys(sites))
    if not sites_of:
        return []
    hidden = {metric: list(sites) for metric, sites in sites_of.items()}
    sentences = describe_hidden(hidden, runs[0].settings.common)
    return [*sentences, "to compare all values, if you may see them: --no-floor"]


def _left_out(runs: Sequence[FinishedRun], split: str) -> list[str]:
    """Build the remark on the sites at which some metrics are left out of the means.

    A mean must cover the same sites in all runs. If one run lacks a metric at a site, the metric is
    therefore not used there for any run.

    Returns:
        A list with one sentence that names these sites. The list is empty if no metric is left out.
    """
    ends = [run.last_metrics(split) for run in runs]
    sites: set[str] = set()
    for own, shared in zip(ends, shared_metrics(runs, ends), strict=True):
        for site in own:
            # Something was removed at this site so that means cover the same sites in all runs
            if own[site] != shared[site]:
                sites.add(site)
    if not sites:
        return []
    return [f"means and tests leave out metrics that some runs lack, at {', '.join(sorted(sites))}"]


def _results(
    jobs: Sequence[Job],
    runs: Sequence[FinishedRun],
    summaries: Summaries,
    split: str,
    wanted: str | None,
    measured: Collection[str] = (),
) -> pd.DataFrame:
    """Collect the tidy results of each experiment, then those of a baseline.

    Tidy results have a row for each experiment, group of sites, metric and seed. The baseline
    always predicts the second of two classes. It is added for each data set: for every seed if the
    seeds have different splits, otherwise once.

    Args:
        jobs: the jobs of all runs.
        runs: the run of each job.
        summaries: experiment -> seed -> summary (the run's means over sites).
        split: ``test`` or ``val``.
        wanted: names and patterns of metrics. None for the data set's headline metrics.
        measured: the names of all metrics that the runs have, also of hidden ones, for the error
            about a hidden metric.
    """
    metrics = None
    if wanted:
        every = itertools.chain(*(by_seed.values() for by_seed in summaries.values()))
        metrics = chosen_metrics(wanted, list(every), "--metrics", measured)
    frames = []
    data_sets = {job.experiment: job.settings.common.dataset for job in jobs}
    tasks = {job.experiment: job.settings.common.task for job in jobs}
    by_experiment: dict[str, list[FinishedRun]] = {}
    for job, run in zip(jobs, runs, strict=True):
        by_experiment.setdefault(job.experiment, []).append(run)
    last_runs: dict[str, list[FinishedRun]] = {}  # data set -> runs of its last experiment
    for name, of_experiment in by_experiment.items():
        data = data_sets[name]
        last_runs[data] = of_experiment
        shown = metrics or shown_metrics(data, tasks[name])
        frames.append(experiment_results(name, summaries[name], shown))
    for on_data in last_runs.values():
        cuts = on_data
        if same_split(on_data) is not False:
            cuts = on_data[:1]  # the same samples would give the same numbers for each seed
        for seed, run in enumerate(cuts):
            frames.append(constant_results(run.silos, split, metrics, seed))
    return pd.concat(frames, ignore_index=True)


def refuse_without(split: str, jobs: Sequence[Job], no_floor: bool = False) -> None:
    """Check before any run that some site has enough samples in ``split`` to show a metric.

    One sample is enough if ``no_floor`` is True, or if 'privacy.trust' is not ``server``. Otherwise
    'privacy.sums-min-count' samples are needed. If the data are not on this machine, nothing can be
    checked and no error is raised.

    Args:
        split: the split to compare, ``test`` or ``val``.
        jobs: the planned runs.
        no_floor: whether to compare all metrics, regardless of the number of samples.

    Raises:
        SettingError: no site of any job has enough samples in the split.
    """
    has_samples = False
    for job in jobs:
        common = job.settings.common
        try:
            silos = [load_silo(name, common) for name in silo_names(common)]
        except DataError:
            return
        # One job with samples is enough, because other jobs only lack columns
        most = max(len(silo.splits()[split]) for silo in silos)
        if most >= common.sums_min_count or (most and (no_floor or common.trust != SERVER)):
            return
        has_samples |= most > 0
    raise _nothing_to_compare(split, too_few=has_samples)


def refuse_one_split(jobs: Sequence[Job]) -> None:
    """Check that seeds 0 and 1 of an experiment have different splits, as ``--splits`` demands.

    ``jobs`` must be ordered by experiment and then by seed, because only neighbouring jobs are
    compared. Other seeds are not checked. If the data are not on this machine, nothing can be
    checked and no error is raised.

    Raises:
        SettingError: seeds 0 and 1 of an experiment have the same split.
    """
    for one, other in itertools.pairwise(job.settings.common for job in jobs):
        if (one.seed, other.seed) != (0, 1):
            continue
        with suppress(DataError):  # without data, finished runs can still be shown
            if _fingerprints(one) == _fingerprints(other):
                raise SettingError(
                    f"--splits: '{one.run_name}' and '{other.run_name}' have the same split, which "
                    "'split.fold-seed' does not change: set 'split.test-folds', or remove --splits"
                )


def _fingerprints(common: CommonSettings) -> list[Mapping[str, str]]:
    """Load each site's data, and return the fingerprints: split -> digest of its rows."""
    return [load_silo(site, common).fingerprints for site in silo_names(common)]
