"""The report for research: settings, curves, final metrics, comparisons, and costs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fedsilo.comparison.results import (
    experiment_results,
    shared_metrics,
    summaries_by_seed,
)
from fedsilo.comparison.tables import group_lines, mean, over_seeds, seconds_text, spread_cell
from fedsilo.core.drawing.palette import line_styles
from fedsilo.core.methods import settings_class
from fedsilo.core.settings.common_settings import SUMS, CommonSettings
from fedsilo.core.settings_schema import Value, defaults
from fedsilo.datasets.registry import shown_of
from fedsilo.models.tasks.task import task_class
from fedsilo.pages.page import NONE, Picture
from fedsilo.pages.page_pictures import curves
from fedsilo.pictures.learning_curves import series
from fedsilo.reports.reporting_guideline import guideline_rows
from fedsilo.reports.research_comparison import (
    NO_COMPARISON,
    Runs,
    Summaries,
    comparison_data,
    comparison_head,
)
from fedsilo.reports.run_facts import experiments_of, head_of, taking_part, value_text
from fedsilo.runs.finished_run import Shown
from fedsilo.server_app.records.partial_means import describe_partial_means
from fedsilo.server_app.records.progress import bytes_text

_NAMED = 6  # lines whose last value is in a picture's description; the table has all

Line = dict[int, float]  # round -> value


def research_data(runs: Runs) -> dict[str, Any]:
    """Build the template variables of ``research.html``, the page on one run or on several.

    All metrics are those on test samples. If no run has any, all are those on validation samples.

    - ``in_short``: the head of the page.
    - ``several``, ``pooled``, ``published``: whether there are several runs, whether one has trust
      level ``sums``, and whether a paper has numbers for one.
    - ``split``: the samples of the metrics, "test" or "val".
    - ``first``, ``guideline``: the sites of the first run, and its table of TRIPOD+AI.
    - ``rows``, ``cost``: a row about each run, and a row with its costs.
    - ``settings``, ``curves``, ``final``: the settings, curves and final metrics of the runs.
    - ``marks``: the method's remarks by round; empty for several runs.
    - ``other_sites``: the names of the runs whose sites differ from those of the first run.
    - ``withheld``: the sites with hidden metrics.
    - ``failed``, ``early``, ``unrepeatable``: the runs with problems.

    The variables of ``comparison_data`` compare experiments, which are groups of runs that differ
    only in their seeds. With one experiment, they are empty, False or None.
    """
    first = runs[0]
    several = len(runs) > 1
    # Without test samples at any site, the page is about the validation samples
    split = "val"
    if any(run.summary["mean"] for run in runs):
        split = "test"
    summaries = summaries_by_seed([run.experiment for run in runs], runs, split)
    head = head_of(first)
    marks = []
    if several:
        head |= comparison_head(runs, summaries, split)
    else:
        for at, mark in first.summary["marks"].items():
            marks.append(f"round {at}: {mark}")
    compared = NO_COMPARISON
    if len(summaries) > 1:
        compared = comparison_data(runs, summaries, split)
    withheld: set[str] = set()
    other_sites, rows, costs = [], [], []
    pooled = published = False
    for run in runs:
        withheld |= set(run.withheld)
        pooled |= run.trust == SUMS
        published |= bool(run.paper.numbers)
        # The page describes the sites of the first run only, so it names the runs that differ
        if run.silos != first.silos:
            other_sites.append(run.name)
        rows.append(_row(run))
        costs.append(_cost(run))
    return {
        "in_short": head,
        "several": several,
        "split": split,
        "pooled": pooled,
        "first": taking_part(first),
        "rows": rows,
        "settings": _settings(runs),
        "other_sites": other_sites,
        "curves": _draw_curves(runs, split),
        "marks": marks,
        "final": list(_final_tables(summaries)),
        "published": published,
        **compared,
        "cost": costs,
        "withheld": sorted(withheld),
        "guideline": guideline_rows(first),
        **_went_wrong(runs),
    }


def _went_wrong(runs: Runs) -> dict[str, Any]:
    """Build the template variables on runs in which something went wrong.

    ``failed`` describes the sites and failures of each run with failed sites, as ``taking_part``
    does. ``early`` has the name of each run that ended early, with the reason. ``unrepeatable`` has
    the name of each run that cannot be repeated exactly, with the operations that prevent it.
    """
    failed, early, unrepeatable = [], [], []
    for run in runs:
        if run.summary["failures"]:
            failed.append(taking_part(run))
        if run.summary["stopped"]:
            early.append((run.name, run.summary["stopped"]))
        operations = run.summary["unrepeatable-operations"]
        if operations:
            unrepeatable.append((run.name, ", ".join(operations)))
    return {"failed": failed, "early": early, "unrepeatable": unrepeatable}


def _row(run: Shown) -> list[str]:
    """Build the row of a run: name, method, data set, seed, finished rounds, number of sites."""
    summary = run.summary
    return [
        run.name,
        summary["title"],
        summary["dataset"],
        str(summary["seed"]),
        f"{summary['rounds']} of {run.settings.common.rounds}",
        str(len(run.silos)),
    ]


def _settings(runs: Runs) -> dict[str, Any]:
    """Build the template variables on the settings and the software of the runs.

    ``experiments`` has the names of the experiments, each a group of runs that differ only in the
    seed. ``differing`` has a row for each setting except the seed that differs between runs, with a
    column for each experiment. ``changed`` has pairs (key, value) for settings that are equal in
    all runs but differ from the default. ``software`` lists the different software versions.
    """
    decisive, keys, software = [], dict[str, None](), dict[str, None]()
    for run in runs:
        decisive.append(run.settings.decisive())
        keys |= dict.fromkeys(run.settings.decisive())
        software[_software(run)] = None
    # One column per experiment: its runs differ only in the seed
    by_experiment = experiments_of(runs)
    # Settings of other methods than the first run's always differ, so their defaults do not matter
    usual = defaults(CommonSettings) | defaults(settings_class(str(runs[0].summary["method"])))
    differing, changed = [], []
    for key in keys:
        if len({values.get(key) for values in decisive}) == 1:
            if usual.get(key) != decisive[0][key]:
                changed.append((key, value_text(decisive[0][key])))
        elif key != "seed":
            row = [key]
            for by_seed in by_experiment.values():
                row.append(_values(by_seed.values(), key))
            differing.append(row)
    return {
        "experiments": list(by_experiment),
        "differing": differing,
        "changed": changed,
        "software": "; ".join(software),
    }


def _values(runs: Iterable[Shown], key: str) -> str:
    """Format the values of a setting in the runs of an experiment, each once."""
    texts: dict[str, None] = {}
    for run in runs:
        texts[_setting_text(run.settings.decisive().get(key))] = None
    return ", ".join(texts)


def _setting_text(value: Value | None) -> str:
    """Format a setting's value; None, from a run whose method lacks the setting, is "-"."""
    if value is None:  # a setting of another run's method
        return "-"
    return value_text(value)


def _software(run: Shown) -> str:
    """List fedsilo's git revision and the packages' versions that the run recorded."""
    environment = run.config.environment
    revision = str(environment.get("fedsilo-revision", ""))[:12]
    # The revision, because many revisions have the same version
    versions = {"fedsilo": revision} | environment.get("packages", {})
    parts = []
    for name, version in versions.items():
        if version:
            parts.append(f"{name} {version}")
    return ", ".join(parts)


def _draw_curves(runs: Runs, split: str) -> list[Picture]:
    """Draw the learning curves of the runs, with a picture for each metric that some run has.

    The first run's task decides the metrics. Lines stand for experiments (runs that differ only in
    the seed) or, for a single run, for origins of data. A line looks the same in all pictures.
    """
    drawn: dict[str, dict[str, Line]] = {}
    names: dict[str, None] = {}
    # Styles are chosen for the names of all pictures, or a line's colour would change between them
    wanted = task_class(runs[0].task).curves
    for metric in wanted:
        lines = _lines(runs, metric, split)
        if lines:
            drawn[metric] = lines
            names |= dict.fromkeys(lines)
    styles = line_styles(list(names))
    pictures = []
    for metric, lines in drawn.items():
        label = f"{split} {wanted[metric]}"
        svg = curves(f"curve-{metric}", lines, styles, label)
        caption = f"{label[0].upper()}{label[1:]}, by round."
        pictures.append(Picture(svg, _describe_lines(lines, label), caption))
    return pictures


def _describe_lines(lines: Mapping[str, Line], label: str) -> str:
    """Describe a picture of curves in words, for readers who cannot see it.

    The text gives ``label``, the last round's number, and the last value of each of the first six
    lines. Further lines are only counted.
    """
    last_round = 0
    ends = []
    for name, line in lines.items():
        end = max(line)
        last_round = max(last_round, end)
        ends.append(f"{name} {line[end]:.3f}")
    more = ""
    if len(ends) > _NAMED:
        more = f" and {len(ends) - _NAMED} more lines"
    return f"{label} over {last_round} rounds. At the end: {', '.join(ends[:_NAMED])}{more}."


def _lines(runs: Runs, metric: str, split: str) -> dict[str, Line]:
    """Collect the lines of a metric for a picture of curves: title -> round -> mean value.

    For a single run, there is a line for each origin of data (``distribution``). It is the mean
    over the sites with that origin. For several runs, there is a line for each experiment, from
    ``_experiment_lines``.
    """
    if len(runs) > 1:
        return _experiment_lines(runs, metric, split)
    run = runs[0]
    distribution_of = {site: str(facts["distribution"]) for site, facts in run.silos.items()}
    return series(run.metric_rows, metric, distribution_of, split)


def _experiment_lines(runs: Runs, metric: str, split: str) -> dict[str, Line]:
    """Average a metric over the runs of each experiment: experiment -> round -> mean.

    A run's value in a round is the mean over the same sites in all rounds. Otherwise a line would
    jump when a site misses a round. These sites have the metric in every round of all ``runs`` on
    the same data set. A run without such sites adds nothing.
    """
    values_of, measured = [], []
    for run in runs:
        by_round = _values_by_round(run, metric, split)
        values_of.append(by_round)
        # shared_metrics needs the sites and metrics, but no values
        measured.append({site: {metric: 0.0} for site in _sites_of_every_round(by_round)})
    lines: dict[str, dict[int, list[float]]] = {}
    for run, by_round, metrics in zip(runs, values_of, shared_metrics(runs, measured), strict=True):
        line = lines.setdefault(run.experiment, {})
        # shared_metrics empties a site that another run lacks
        sites = [site for site, remaining in metrics.items() if remaining]
        if not sites:
            continue
        for at, value_of in sorted(by_round.items()):
            line.setdefault(at, []).append(mean(map(value_of.__getitem__, sites)))
    means: dict[str, Line] = {}
    for name, line in lines.items():
        for at, values in line.items():
            means.setdefault(name, {})[at] = mean(values)
    return means


def _values_by_round(run: Shown, metric: str, split: str) -> dict[int, dict[str, float]]:
    """Collect the values of a metric on the samples of ``split``: round -> site -> value."""
    by_round: dict[int, dict[str, float]] = {}
    for row in run.metric_rows:
        if row["split"] == split and row["metric"] == metric:
            by_round.setdefault(int(row["round"]), {})[row["site"]] = float(row["value"])
    return by_round


def _sites_of_every_round(by_round: Mapping[int, Mapping[str, float]]) -> set[str]:
    """Return the sites that have a value in every round. Without rounds, the set is empty."""
    if not by_round:
        return set()
    return set.intersection(*map(set, by_round.values()))


def _final_tables(experiments: Summaries) -> Iterator[dict[str, Any]]:
    """Yield the template variables for a table of each experiment's metrics in the last round.

    ``caption`` names the experiment and its number of seeds. ``columns`` are the task's main
    metrics, each followed by the numbers that the method's paper published, if any. ``rows`` has a
    row for each origin of data and one for all sites. With several seeds, a cell is the mean ± the
    standard deviation. A missing cell is "n/a". ``note`` names sites that a mean does not cover. An
    experiment without main metrics has no table.

    Args:
        experiments: experiment -> seed -> the run's summary.
    """
    for experiment, summaries in experiments.items():
        shown = shown_of(next(iter(summaries.values())))
        results = experiment_results(experiment, summaries, shown)
        spreads = over_seeds(results)
        if spreads.empty:
            continue
        seeds = "one seed"
        if len(summaries) > 1:
            seeds = f"mean ± sd over {len(summaries)} seeds"
        # Only metrics that some group has get a column
        metrics = list(spreads["metric"].unique())
        titles = dict(zip(metrics, metrics, strict=True))
        in_paper = spreads.loc[spreads["published"].notna(), "metric"]
        published = dict.fromkeys(in_paper, "published")
        partial = describe_partial_means(list(summaries.values()), metrics)
        columns, *lines = group_lines(spreads, titles, published, spread_cell, NONE)
        yield {
            "caption": f"{experiment}, {seeds}",
            "columns": ["site or group", *columns],
            "rows": [line[1:] for line in lines],  # without the experiment, which the caption has
            "note": "".join(f"{sentence}. " for sentence in partial).rstrip(),
        }


def _cost(run: Shown) -> list[str]:
    """Build a run's row in the table of costs.

    The cells are the run's name, optimiser steps, samples, duration, total work of all sites, bytes
    to the sites, bytes from the sites, and peak memory. The memory is the largest peak of any site.
    Steps, samples, work and memory are "n/a" if they are 0, because sites that do not report them
    send 0.
    """
    summary = run.summary
    # Each reply has its steps and samples, or 0 from a site that does not report them
    steps = samples = 0
    for row in run.traffic_rows:
        steps += int(row["steps"])
        samples += int(row["samples"])
    worked = sum(summary["seconds"]["sites"].values())
    peak = max(summary["peak-memory-bytes"].values(), default=0)
    return [
        run.name,
        _unless_zero(steps, "{:,}".format),
        _unless_zero(samples, "{:,}".format),
        seconds_text(summary["seconds"]["total"]),
        _unless_zero(worked, seconds_text),
        bytes_text(summary["bytes"]["down"]),
        bytes_text(summary["bytes"]["up"]),
        _unless_zero(peak, bytes_text),
    ]


def _unless_zero(number: Any, format_number: Callable[[Any], str]) -> str:
    """Format a cost; 0 is "n/a", because sites that do not report a cost send 0."""
    if not number:
        return NONE
    return format_number(number)
