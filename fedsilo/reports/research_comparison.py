"""The comparison in the research report: means over seeds, paired differences, tests, cost."""

import itertools
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from fedsilo.comparison.budgets import Budgets, budget_of
from fedsilo.comparison.results import values_by_seed
from fedsilo.comparison.significance import Outcome, Tested, significance
from fedsilo.comparison.tables import mean, p_equation
from fedsilo.core.drawing.palette import line_styles
from fedsilo.core.metric_names import best_direction, metric_range
from fedsilo.core.one_line import format_count
from fedsilo.datasets.registry import shown_of
from fedsilo.models.measures.intervals import Estimate, of_mean
from fedsilo.pages.page import Picture, share, with_interval
from fedsilo.pages.page_pictures import estimates, scatter
from fedsilo.reports.run_facts import experiments_of, facts
from fedsilo.runs.finished_run import Shown, same_split
from fedsilo.server_app.records.partial_means import over_sites

_PAIRS = 15  # largest number of pairs of experiments whose differences are drawn
_CHANCE = 0.05  # a difference with this p value or a larger one may be chance

# The template variables of a page with one experiment
NO_COMPARISON: Mapping[str, Any] = {
    "data_sets": [],
    "compared": [],
    "one_seed": False,
    "paired": False,
    "same_split": None,
    "unequal": [],
    "cost_picture": [],
}

Runs = Sequence[Shown]
Summaries = Mapping[str, Mapping[int, Mapping[str, Any]]]  # experiment -> seed -> summary
BySeed = Mapping[int, float]


def comparison_data(runs: Runs, summaries: Summaries, split: str) -> dict[str, Any]:
    """Build the template variables that compare two or more experiments.

    Args:
        runs: all runs of the page.
        summaries: the same runs, from ``summaries_by_seed``.
        split: the samples that the metrics are about, ``test`` or ``val``.

    Returns:
        A dictionary with these keys:

        - ``data_sets``: the names of the data sets, sorted.
        - ``compared``: a comparison for each of the task's main metrics.
        - ``cost_picture``: a list with at most one picture.
        - ``unequal``: a line for each experiment with other resources than its baseline.
        - ``one_seed``: whether no experiment has more than one seed.
        - ``paired``: whether all experiments have the same seeds.
        - ``same_split``: whether all runs have the same samples in each split; None if unknown.

        With several data sets, ``compared`` and ``cost_picture`` are empty.
    """
    experiments = experiments_of(runs)
    most_seeds = max(map(len, experiments.values()))
    data_sets = {str(run.summary["dataset"]) for run in runs}
    compared: list[dict[str, Any]] = []
    cost_pictures: list[Picture] = []
    # Metrics of different data sets are not on a common scale
    if len(data_sets) == 1:
        metrics = _headline(runs)
        compared = _compare_runs(metrics, summaries, split)
        cost_pictures = _draw_cost(metrics[0], summaries, split)
    return {
        "data_sets": sorted(data_sets),
        "compared": compared,
        "one_seed": most_seeds < 2,
        "paired": _has_same_seeds(experiments),
        "same_split": same_split(runs),
        "unequal": _unequal_budgets(experiments),
        "cost_picture": cost_pictures,
    }


def _has_same_seeds(experiments: Mapping[str, Mapping[int, Any]]) -> bool:
    """Tell whether all experiments have the same set of seeds.

    ``experiments`` maps each experiment to a mapping whose keys are the seeds.
    """
    seeds = {tuple(sorted(by_seed)) for by_seed in experiments.values()}
    return len(seeds) == 1


def _headline(runs: Runs) -> Sequence[str]:
    """Return the metrics that the first run's result tables show."""
    return shown_of(runs[0].summary)


def _compare_runs(metrics: Sequence[str], summaries: Summaries, split: str) -> list[dict[str, Any]]:
    """Compare the experiments by each metric, as means over sites.

    A metric is skipped unless at least two experiments have a value with any seed.

    Returns:
        For each remaining metric, in the order of ``metrics``, the pictures, tables and tests of
        ``_comparison``.
    """
    compared = []
    for metric in metrics:
        samples = _known_values(summaries, metric)
        if len(samples) > 1:
            label = f"{split} {metric}, mean {_over_sites(summaries, metric)}"
            compared.append(_comparison(metric, label, samples, split))
    return compared


def _known_values(summaries: Summaries, metric: str) -> dict[str, dict[int, float]]:
    """Collect the mean of a metric over sites: experiment -> seed -> mean.

    Seeds without a value are left out, and so are experiments without any value.
    """
    known = {}
    for name, by_seed in values_by_seed(summaries, metric).items():
        if by_seed:
            known[name] = by_seed
    return known


def _over_sites(summaries: Summaries, metric: str) -> str:
    """Describe the sites that the means of all experiments are over, as ``over_sites`` does."""
    return over_sites(chain(*(by_seed.values() for by_seed in summaries.values())), metric)


def _comparison(
    metric: str, label: str, samples: Mapping[str, BySeed], split: str
) -> dict[str, Any]:
    """Build the template variables that compare the experiments by one metric.

    ``picture`` and ``means`` show the mean of each experiment over its seeds, with a 95 % t
    interval. ``differences`` has a picture of the differences between pairs. ``pairs`` and
    ``tests`` describe an ANOVA and t-tests of all pairs. The t-tests are paired by seed if all
    experiments have the same seeds. ``no_test`` is the reason if no test was possible.

    Args:
        metric: the metric's name.
        label: the text for pictures: the split, the metric, and the sites averaged over.
        samples: experiment -> seed -> mean over sites.
        split: the split of the samples, for the heading of the tests.
    """
    points, centres, rows, descriptions = {}, {}, [], []
    for name, by_seed in samples.items():
        points[name] = list(by_seed.values())
        centres[name] = _mean(metric, points[name])
        cell = with_interval(centres[name])
        rows.append([name, str(len(by_seed)), cell])
        descriptions.append(f"{name}: {cell}")
    svg = estimates(f"compared-{metric}", {"mean": centres}, label, points)
    alt = f"{label}. {'; '.join(descriptions)}."
    # The tests treat experiments with unequal seeds as independent
    tested = significance(metric, samples, _has_same_seeds(samples))
    return {
        "name": metric,
        "picture": Picture(svg, alt, f"{label}; bars: 95 % intervals (t)."),
        "caption": f"{label[0].upper()}{label[1:]}",
        "differences": _draw_differences(metric, samples, split),
        "means": rows,
        "no_test": _reason_for_no_test(tested),
        "pairs": tested.lines(),
        "tests": f"{'. '.join([tested.heading(split), *tested.reasons()])}.",
    }


def _reason_for_no_test(tested: Tested) -> str:
    """Return the reason if no test between the experiments has a p value.

    The tests are the ANOVA over all experiments and the t-tests of all pairs. If any of them has a
    p value, the text is empty. Otherwise it is the reason that the ANOVA gives.
    """
    # A pair may have a p although the analysis of variance lacks it, for example if a third
    # experiment has a single seed
    for outcome in (tested.anova, *tested.pairs.values()):
        if outcome.p is not None:
            return ""
    return tested.anova.why


def _mean(metric: str, values: Sequence[float], *, difference: bool = False) -> Estimate:
    """Return the mean over seeds with its 95 % t interval, clipped to the range of the metric.

    With a single value, there is no interval. If ``difference`` is True, the values are differences
    between two experiments. The interval is then clipped to plus or minus the width of that range.
    """
    least, most = metric_range(metric)
    if difference:
        least, most = least - most, most - least
    return Estimate(mean(values), of_mean(values, least, most))


def _draw_differences(metric: str, samples: Mapping[str, BySeed], split: str) -> list[Picture]:
    """Draw the differences between experiments, seed by seed, for each pair of experiments.

    A pair is drawn if the experiments have at least two seeds in common, up to 15 pairs. The
    picture shows a point for each seed, and the mean with its 95 % interval. A difference is the
    later experiment of ``samples`` minus the earlier one. The list has this one picture. Without
    any such pair, it is empty.
    """
    points: dict[str, list[float]] = {}
    for earlier, later in itertools.combinations(samples, 2):
        seeds = sorted(samples[earlier].keys() & samples[later].keys())
        # An interval needs two seeds, and the means already show the difference of one
        if len(seeds) > 1 and len(points) < _PAIRS:
            apart = [samples[later][seed] - samples[earlier][seed] for seed in seeds]
            points[f"{later} - {earlier}"] = apart
    if not points:
        return []
    means, descriptions = {}, []
    for pair, values in points.items():
        means[pair] = _mean(metric, values, difference=True)
        descriptions.append(f"{pair}: {with_interval(means[pair])}")
    label = f"difference in {split} {metric}, by seed"
    said = "; ".join(descriptions)
    svg = estimates(f"differences-{metric}", {"mean": means}, label, points)
    return [Picture(svg, f"{label}. {said}.", f"Paired differences, points: seeds. {said}.")]


def _draw_cost(metric: str, summaries: Summaries, split: str) -> list[Picture]:
    """Draw a metric against the megabytes that all sites sent and received.

    Each run with the metric has a point. The list has this one picture. If fewer than two
    experiments have a point, it is empty.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for experiment, by_seed in summaries.items():
        for summary in by_seed.values():
            value = summary["mean"].get(metric)
            # A run without the metric is skipped, but other runs of the experiment may have it
            if value is not None:
                megabytes = (summary["bytes"]["up"] + summary["bytes"]["down"]) / 1e6
                points.setdefault(experiment, []).append((megabytes, value))
    if len(points) < 2:
        return []
    label = f"{split} {metric}, mean {_over_sites(summaries, metric)}"
    over = "MB sent and received by all sites"
    svg = scatter("cost", points, line_styles(list(points)), over, label)
    descriptions = []
    for name, places in points.items():
        _, values = zip(*places, strict=True)
        descriptions.append(f"{name}: {share(mean(values))}")
    alt = f"{label}, over {over}. {'; '.join(descriptions)}."
    return [Picture(svg, alt, f"{metric} against cost, one point per run.")]


def comparison_head(runs: Runs, summaries: Summaries, split: str) -> dict[str, Any]:
    """Build the template variables for the head of a page on several runs.

    ``facts`` has facts on the first run except its method and its training. The methods of all runs
    and the numbers of experiments and runs follow. ``result`` names the experiment with the best
    mean. ``limit`` says that an interval over seeds tells nothing about other patients.
    """
    methods: dict[str, None] = {}
    for run in runs:
        methods[f"{run.summary['title']} ({run.summary['method']})"] = None
    common = []
    for name, value in facts(runs[0]):
        if name not in ("method", "trained"):  # those differ between the runs
            common.append((name, value))
    counts = f"{len(summaries)} experiments, {format_count(len(runs), 'run')}"
    return {
        "facts": [*common, ("methods", ", ".join(methods)), ("runs", counts)],
        "result": _best_experiment(runs, summaries, split),
        "limit": "An interval over seeds shows how much seeds scatter, but nothing about other "
        "patients.",
    }


def _best_experiment(runs: Runs, summaries: Summaries, split: str) -> str:
    """Describe which experiment has the best mean of the task's first main metric.

    The text gives this mean over seeds with its 95 % interval, and the next best experiment with
    its mean. A t-test compares the two. If its p value is 0.05 or more, the text says that no
    experiment is clearly best. Without a p value, it says that no test is possible.

    A single experiment only has its mean. If the runs are on several data sets, or if no run has
    the metric, the text only says so.

    Args:
        runs: all runs of the page.
        summaries: experiment -> seed -> the run's summary.
        split: ``test`` or ``val``, for the text.
    """
    data = runs[0].summary["dataset"]
    if any(run.summary["dataset"] != data for run in runs):
        return "The runs are on several data sets and are not compared."
    metric = _headline(runs)[0]
    samples = _known_values(summaries, metric)
    means = {}
    for name, by_seed in samples.items():
        # The same means and intervals as in the table of this metric
        means[name] = _mean(metric, list(by_seed.values()))
    if not means:
        return f"No run has a {split} {metric} that may be shown."
    order, direction = "Highest", 1
    if best_direction(metric) < 0:
        order, direction = "Lowest", -1
    # Equal means stay in the order of the runs
    best, *others = sorted(means, key=lambda name: -direction * means[name].value)
    seeds = format_count(len(samples[best]), "seed")
    label = f"{split} {metric}, mean {_over_sites(summaries, metric)}"
    said = f"{best}, {with_interval(means[best])} over {seeds}"
    if not others:
        return f"{label[0].upper()}{label[1:]}: {said}."
    following = others[0]
    said += f"; the next is {following}, {share(means[following].value)}"
    pairs = significance(metric, samples, _has_same_seeds(samples)).pairs
    # A pair is named in the order of the runs, the later one first
    tested = pairs.get((best, following), pairs.get((following, best), Outcome(None)))
    if tested.p is None:
        return f"{order} {label}: {said}. No test can tell whether this is more than chance."
    if tested.p >= _CHANCE:
        return f"No clear best {label}: {said}, which may be chance ({p_equation(tested.p)})."
    return f"{order} {label}: {said} ({p_equation(tested.p)})."


def _unequal_budgets(experiments: Mapping[str, Mapping[int, Shown]]) -> list[str]:
    """List the experiments whose resources differ from those of their baseline.

    Resources are settings, such as the number of rounds, and measured costs, such as optimiser
    steps. The baseline is the first experiment on the same data set. Each experiment that differs
    has a line with its name and its differences. The settings are those of the experiment's first
    run, and the costs are means over its runs.
    """
    budgets = {}
    for name, by_seed in experiments.items():
        runs = list(by_seed.values())
        budgets[name] = budget_of(runs[0].settings).with_costs(runs)
    lines = []
    for name, parts in Budgets(budgets).unlike().items():
        lines.append(f"{name}: {'; '.join(parts)}")
    return lines
