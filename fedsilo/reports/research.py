"""A report for research: what was run, how it went, what differs by more than seeds, the cost."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedsilo.comparison.budgets import Budgets, budget_of
from fedsilo.comparison.results import (
    experiment_results,
    shared_metrics,
    shared_summaries,
    values_by_seed,
)
from fedsilo.comparison.significance import significance
from fedsilo.comparison.tables import (
    group_lines,
    mean,
    over_seeds,
    seconds_text,
    spread_cell,
)
from fedsilo.core.drawing.palette import line_styles
from fedsilo.core.methods import settings_class
from fedsilo.core.one_line import counted
from fedsilo.core.settings.common_settings import SUMS, CommonSettings
from fedsilo.core.settings_schema import defaults
from fedsilo.datasets.registry import data_set
from fedsilo.models.measures.intervals import Estimate, of_mean
from fedsilo.pages.number_texts import NONE, with_interval
from fedsilo.pages.page import Picture
from fedsilo.pages.page_pictures import curves, estimates, scatter
from fedsilo.pictures.learning_curves import CURVES, series
from fedsilo.reports.dpo import value_text
from fedsilo.reports.headline import facts, head_of
from fedsilo.reports.runs import experiments_of, taking_part
from fedsilo.runs.finished_run import Shown, same_split
from fedsilo.server_app.records.progress import bytes_text

_PAIRS = 15  # most pairs of experiments whose differences are drawn
_NAMED = 6  # lines whose last value the description of a picture has; the table has all

Runs = Sequence[Shown]


def research_data(runs: Runs) -> dict[str, Any]:
    """Build the template variables of ``research.html`` for one run, or several to compare."""
    split = "test" if any(run.summary["mean"] for run in runs) else "val"
    first, experiments = runs[0], experiments_of(runs)
    seeds = {tuple(sorted(by_seed)) for by_seed in experiments.values()}
    data_sets = sorted({str(run.summary["dataset"]) for run in runs})
    alone = len(experiments) < 2
    operations = {run.name: run.summary["unrepeatable-operations"] for run in runs}
    marks = first.summary["marks"].items()
    return {
        "in_short": head_of(first) | (_head(runs, split) if len(runs) > 1 else {}),
        "several": len(runs) > 1,
        "split": split,
        "pooled": any(run.trust == SUMS for run in runs),
        "first": taking_part(first),
        "rows": [_row(run) for run in runs],
        "settings": _settings(runs),
        "other_sites": [run.name for run in runs if run.silos != first.silos],
        "curves": [*_curves(runs, split)],
        "marks": [f"round {at}: {mark}" for at, mark in marks] if len(runs) == 1 else [],
        "final": [*_final(runs, split)],
        "published": any(run.paper.numbers for run in runs),
        "data_sets": [] if alone else data_sets,
        "compared": [] if alone or len(data_sets) > 1 else [*_compare_runs(runs, split)],
        "one_seed": max(map(len, seeds)) < 2,
        "paired": len(seeds) == 1,
        "same_split": None if alone else same_split(runs),
        "unequal": [] if alone else _unequal(experiments),
        "cost": [_cost(run) for run in runs],
        "cost_picture": [] if alone or len(data_sets) > 1 else [*_cost_against(runs, split)],
        "withheld": sorted({site for run in runs for site in run.withheld}),
        "failed": [taking_part(run) for run in runs if run.summary["failures"]],
        "early": [(r.name, r.summary["stopped"]) for r in runs if r.summary["stopped"]],
        "unrepeatable": [(name, ", ".join(used)) for name, used in operations.items() if used],
    }


def _row(run: Shown) -> list[str]:
    summary = run.summary
    rounds = f"{summary['rounds']} of {run.settings.common.rounds}"
    facts = (summary["title"], summary["dataset"], str(run.summary["seed"]), rounds)
    return [run.name, *facts, str(len(run.silos))]


def _settings(runs: Runs) -> dict[str, Any]:
    decisive = [run.settings.decisive() for run in runs]
    keys = list(dict.fromkeys(key for values in decisive for key in values))
    differing = [key for key in keys if len({values.get(key) for values in decisive}) > 1]
    by_experiment = experiments_of(runs)
    usual = defaults(CommonSettings) | defaults(settings_class(str(runs[0].summary["method"])))
    alike = {key: decisive[0][key] for key in keys if key not in differing}
    return {
        "experiments": list(by_experiment),
        "differing": [
            [key, *(_values(list(by_seed.values()), key) for by_seed in by_experiment.values())]
            for key in differing
            if key != "seed"
        ],
        "changed": [(k, value_text(value)) for k, value in alike.items() if usual.get(k) != value],
        "software": "; ".join(dict.fromkeys(map(_software, runs))),
    }


def _values(runs: Runs, key: str) -> str:
    values = (run.settings.decisive().get(key) for run in runs)
    return ", ".join(dict.fromkeys("-" if v is None else value_text(v) for v in values))


def _software(run: Shown) -> str:
    environment = run.config.environment
    packages = environment.get("packages", {})
    named = [("fedsilo", str(environment.get("fedsilo-revision", ""))[:12]), *packages.items()]
    return ", ".join(f"{name} {version}" for name, version in named if version)


def _curves(runs: Runs, split: str) -> Iterator[Picture]:
    lines = {metric: _lines(runs, metric, split) for metric in CURVES}
    drawn = {metric: found for metric, found in lines.items() if found}
    styles = line_styles(list(dict.fromkeys(name for found in drawn.values() for name in found)))
    for metric, found in drawn.items():
        label = f"{split} {CURVES[metric]}"
        ends = [f"{name} {line[max(line)]:.3f}" for name, line in found.items()]
        more = f" and {len(ends) - _NAMED} more lines" if len(ends) > _NAMED else ""
        last = max(max(line) for line in found.values())
        alt = f"{label} over {last} rounds. At the end: {', '.join(ends[:_NAMED])}{more}."
        svg = curves(f"curve-{metric}", found, styles, label)
        yield Picture(svg, alt, f"{label[0].upper()}{label[1:]}, by round.")


def _lines(runs: Runs, metric: str, split: str) -> dict[str, dict[int, float]]:
    """Return the lines of a metric: of one run by distribution, of several by experiment.

    Lines of several runs are of the sites whose metrics every run shows in every round.
    """
    if len(runs) == 1:
        distribution_of = {s: str(f["distribution"]) for s, f in runs[0].silos.items()}
        return series(runs[0].metric_rows, metric, distribution_of, split)
    by_round: list[dict[int, dict[str, float]]] = [{} for _ in runs]
    for run, values in zip(runs, by_round, strict=True):
        for row in run.metric_rows:
            if row["split"] == split and row["metric"] == metric:
                values.setdefault(int(row["round"]), {})[row["site"]] = float(row["value"])
    always = [set.intersection(*map(set, values.values())) if values else () for values in by_round]
    shared = shared_metrics(runs, [{site: {metric: 0.0} for site in sites} for sites in always])
    found: dict[str, dict[int, list[float]]] = {}
    for run, values, metrics in zip(runs, by_round, shared, strict=True):
        line, sites = found.setdefault(run.experiment, {}), [s for s, row in metrics.items() if row]
        for at, of_round in sorted(values.items()) if sites else ():
            line.setdefault(at, []).append(mean([of_round[site] for site in sites]))
    return {name: {at: mean(of) for at, of in line.items()} for name, line in found.items() if line}


def _summaries(runs: Runs, split: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Return experiment -> seed -> summary with the metrics of a split that all runs share."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run, summary in zip(runs, shared_summaries(runs, split), strict=True):
        found.setdefault(run.experiment, {})[run.summary["seed"]] = summary
    return found


def _final(runs: Runs, split: str) -> Iterator[dict[str, Any]]:
    for experiment, summaries in _summaries(runs, split).items():
        metrics = data_set(str(next(iter(summaries.values()))["dataset"])).headline
        spreads = over_seeds(experiment_results(experiment, summaries, metrics))
        if not spreads.empty:
            seeds = f"mean ± sd over {len(summaries)} seeds" if len(summaries) > 1 else "one seed"
            titles = {metric: metric for metric in spreads["metric"].unique()}
            known = spreads.loc[spreads["published"].notna(), "metric"]
            published = dict.fromkeys(known, "published")
            columns, *lines = group_lines(spreads, titles, published, spread_cell, NONE)
            yield {
                "caption": f"{experiment}, {seeds}",
                "columns": ["site or group", *columns],
                "rows": [line[1:] for line in lines],
            }


def _compare_runs(runs: Runs, split: str) -> Iterator[dict[str, Any]]:
    """Yield each headline metric of which more than one experiment has a value."""
    for metric in data_set(str(runs[0].summary["dataset"])).headline:
        samples = values_by_seed(_summaries(runs, split), metric)
        known = {name: by_seed for name, by_seed in samples.items() if by_seed}
        if len(known) > 1:
            yield _comparison(metric, known, split)


def _comparison(
    metric: str, samples: Mapping[str, Mapping[int, float]], split: str
) -> dict[str, Any]:
    points = {name: list(by_seed.values()) for name, by_seed in samples.items()}
    centres = {name: _mean(metric, values) for name, values in points.items()}
    cells = {name: with_interval(one) for name, one in centres.items()}
    label = f"{split} {metric}, mean over sites"
    said = "; ".join(f"{name}: {cell}" for name, cell in cells.items())
    svg = estimates(f"compared-{metric}", {"mean": centres}, label, points)
    paired = len({tuple(sorted(by_seed)) for by_seed in samples.values()}) == 1
    tested = significance(metric, samples, paired)
    none = tested.anova.p is None and all(test.p is None for test in tested.pairs.values())
    return {
        "name": metric,
        "picture": Picture(svg, f"{label}. {said}.", f"{label}; bars: 95 % intervals (t)."),
        "caption": f"{label[0].upper()}{label[1:]}",
        "differences": [*_differences(metric, samples, split)],
        "means": [[name, str(len(points[name])), cell] for name, cell in cells.items()],
        "no_test": tested.anova.why if none else "",
        "pairs": tested.lines(),
        "tests": f"{'. '.join([tested.heading(split), *tested.reasons()])}.",
    }


def _mean(metric: str, values: Sequence[float], *, difference: bool = False) -> Estimate:
    """Return the mean of a metric over seeds, its interval cut off where no mean can be."""
    most = math.inf if metric in ("loss", "entropy", "perplexity") else 1.0
    return Estimate(mean(values), of_mean(values, -most if difference else 0.0, most))


def _differences(
    metric: str, samples: Mapping[str, Mapping[int, float]], split: str
) -> Iterator[Picture]:
    """Yield the differences by seed of each two experiments that have two seeds in common."""
    apart = {
        f"{later} - {earlier}": [samples[later][seed] - samples[earlier][seed] for seed in seeds]
        for earlier, later in itertools.combinations(samples, 2)
        if len(seeds := sorted(samples[earlier].keys() & samples[later].keys())) > 1
    }
    shown = dict(list(apart.items())[:_PAIRS])
    if not shown:
        return
    found = {pair: _mean(metric, values, difference=True) for pair, values in shown.items()}
    said = "; ".join(f"{pair}: {with_interval(one)}" for pair, one in found.items())
    label = f"difference in {split} {metric}, by seed"
    svg = estimates(f"differences-{metric}", {"mean": found}, label, shown)
    yield Picture(svg, f"{label}. {said}.", f"Paired differences, points: seeds. {said}.")


def _cost_against(runs: Runs, split: str) -> Iterator[Picture]:
    """Yield accuracy over bytes, or the data set's first metric, a point for each run."""
    metric = data_set(str(runs[0].summary["dataset"])).headline[0]
    points: dict[str, list[tuple[float, float]]] = {}
    for experiment, by_seed in _summaries(runs, split).items():
        for summary in by_seed.values():
            value = summary["mean"].get(metric)
            if value is not None:
                megabytes = sum(summary["bytes"][way] for way in ("up", "down")) / 1e6
                points.setdefault(experiment, []).append((megabytes, value))
    if len(points) < 2:
        return
    label, over = f"{split} {metric}, mean over sites", "MB sent and received by all sites"
    svg = scatter("cost", points, line_styles(list(points)), over, label)
    said = "; ".join(f"{n}: {mean([y for _, y in at]):.3f}" for n, at in points.items())
    yield Picture(svg, f"{label}, over {over}. {said}.", f"{metric} against cost, a point a run.")


def _head(runs: Runs, split: str) -> dict[str, Any]:
    """Return the head of a comparison, where it is not that of the first run."""
    methods = dict.fromkeys(f"{r.summary['title']} ({r.summary['method']})" for r in runs)
    told = [pair for pair in facts(runs[0]) if pair[0] not in ("method", "trained")]
    counts = f"{len(experiments_of(runs))} experiments, {counted(len(runs), 'run')}"
    return {
        "facts": [*told, ("methods", ", ".join(methods)), ("runs", counts)],
        "result": _result(runs, split),
        "limit": "An interval over seeds says how much seeds scatter, nothing of other patients.",
    }


def _result(runs: Runs, split: str) -> str:
    if len({run.summary["dataset"] for run in runs}) > 1:
        return "The runs are on several data sets and are not compared."
    metric = data_set(str(runs[0].summary["dataset"])).headline[0]
    samples = values_by_seed(_summaries(runs, split), metric)
    found = {n: _mean(metric, list(v.values())) for n, v in samples.items() if v}
    if not found:
        return f"No run has a {split} {metric} that may be shown."
    best = max(found, key=lambda name: found[name].value)
    seeds = counted(len(samples[best]), "seed")
    rest = {name: one.value for name, one in found.items() if name != best}
    said = f"Highest {split} {metric}: {best}, {with_interval(found[best])} over {seeds}"
    if not rest:
        return f"{said}."
    return f"{said}; the next is {max(rest, key=lambda n: rest[n])}, {max(rest.values()):.3f}."


def _unequal(experiments: Mapping[str, Mapping[int, Shown]]) -> list[str]:
    """Return, per experiment, how its budget differs from the first one's."""
    budgets = {}
    for name, by_seed in experiments.items():
        runs = list(by_seed.values())
        budgets[name] = budget_of(runs[0].settings).with_costs(runs)
    return [f"{name}: {'; '.join(parts)}" for name, parts in Budgets(budgets).unlike().items()]


def _cost(run: Shown) -> list[str]:
    seconds, bytes_, peaks = (run.summary[k] for k in ("seconds", "bytes", "peak-memory-bytes"))
    work = (sum(int(row[key]) for row in run.traffic_rows) for key in ("steps", "samples"))
    return [
        run.name,
        *(f"{number:,}" if number else NONE for number in work),
        seconds_text(seconds["total"]),
        seconds_text(worked) if (worked := sum(seconds["sites"].values())) else NONE,
        bytes_text(bytes_["down"]),
        bytes_text(bytes_["up"]),
        bytes_text(peak) if (peak := max(peaks.values(), default=0)) else NONE,
    ]
