"""A report for research: what was run, how it went, what differs by more than seeds, the cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedsilo.datasets.registry import data_set
from fedsilo.models.contract.methods import settings_class
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import Value, defaults
from fedsilo.models.figures.palette import LineStyle, line_styles
from fedsilo.models.maths.intervals import of_mean
from fedsilo.server_app.config.settings import environment_values
from fedsilo.server_app.studies.compare.results import experiment_results, figure_of, of_split
from fedsilo.server_app.studies.compare.significance import Tested, significance
from fedsilo.server_app.studies.compare.tables import mean, over_seeds, published_cell, spread_cell
from fedsilo.server_app.studies.figures.learning_curves import CURVES, series
from fedsilo.server_app.studies.report.numbers import NONE, bytes_text, seconds_text, with_interval
from fedsilo.server_app.studies.report.page import (
    Block,
    Facts,
    Items,
    Picture,
    Pictures,
    Section,
    Table,
    Text,
)
from fedsilo.server_app.studies.report.pictures import Estimate, curves, estimates
from fedsilo.server_app.studies.report.runs import ReportedRun, experiments_of
from fedsilo.server_app.studies.report.taking_part import failures, who_took_part

_NAMED = 6  # lines whose last value is said in words, beside the table that has all


def research_sections(runs: Sequence[ReportedRun]) -> list[Section]:
    """Return the sections about one run, or about several that are compared."""
    split = "test" if any(run.summary["mean"] for run in runs) else "val"
    return [
        Section("What was run", [*_runs(runs)]),
        Section("Settings", [*_settings(runs)]),
        Section("Sites", _sites(runs)),
        Section("Learning curves", [*_curves(runs, split)]),
        Section("Final figures", [*_figures(runs, split)]),
        *_comparison(runs, split),
        Section("Cost", [*_cost(runs)]),
        Section("What went wrong", _failures(runs)),
    ]


def _runs(runs: Sequence[ReportedRun]) -> Iterator[Block]:
    rows = [
        [
            run.name,
            run.summary["title"],
            run.summary["dataset"],
            str(run.seed),
            f"{run.summary['rounds']} of {run.settings['rounds']}",
            str(len(run.run.silos)),
        ]
        for run in runs
    ]
    yield Table("Runs", ["run", "method", "data", "seed", "rounds", "sites"], rows)


def _settings(runs: Sequence[ReportedRun]) -> Iterator[Block]:
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    differing = [key for key in keys if len({run.settings.get(key) for run in runs}) > 1]
    by_experiment = experiments_of(runs)
    rows = [
        [key, *(_values(list(by_seed.values()), key) for by_seed in by_experiment.values())]
        for key in differing
        if key != "seed"
    ]
    if rows:
        yield Table("In what the runs differ", ["setting", *by_experiment], rows)
    elif len(runs) > 1:
        yield Text(["The runs differ in nothing but their seed."])
    usual = defaults(CommonSettings) | defaults(settings_class(str(runs[0].summary["method"])))
    alike = {key: runs[0].settings[key] for key in keys if key not in differing}
    changed = [(key, _text(value)) for key, value in alike.items() if usual.get(key) != value]
    if changed:
        alone = len(runs) == 1
        yield Text(["Not as by default:" if alone else "Alike in all, and not as by default:"])
        yield Facts(changed)
    yield Text(["All settings, with their defaults, stand in 'config.toml' of each run."])
    yield Facts([("software", "; ".join(dict.fromkeys(map(_software, runs))))])


def _values(runs: Sequence[ReportedRun], key: str) -> str:
    return ", ".join(dict.fromkeys(_text(run.settings.get(key)) for run in runs))


def _text(value: Value | None) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value) or "(empty)"


def _software(run: ReportedRun) -> str:
    environment = environment_values(run.run.path / "config.toml")
    packages = environment.get("packages", {})
    named = [("fedsilo", environment.get("fedsilo-revision", "")[:12]), *packages.items()]
    return ", ".join(f"{name} {version}" for name, version in named if version)


def _sites(runs: Sequence[ReportedRun]) -> list[Block]:
    first = runs[0]
    others = [run.name for run in runs if run.run.silos != first.run.silos]
    blocks = who_took_part(first)
    if others:
        said = f"The table is of {first.name}; sites or their splits are others in"
        blocks.append(Text([f"{said} {', '.join(others)}."]))
    return blocks


def _curves(runs: Sequence[ReportedRun], split: str) -> Iterator[Block]:
    lines = {metric: _lines(runs, metric, split) for metric in CURVES}
    drawn = {metric: found for metric, found in lines.items() if found}
    if not drawn:
        yield Text([f"No site measured {split} samples in any round."])
        return
    styles = line_styles(list(dict.fromkeys(name for found in drawn.values() for name in found)))
    if len(runs) == 1:
        yield Text(["A line is the mean over the sites of a distribution."])
    else:
        yield Text(["A line is the mean over all sites and seeds of an experiment."])
    yield Pictures([_curve(metric, found, styles, split) for metric, found in drawn.items()])
    marks = [f"round {at}: {mark}" for run in runs[:1] for at, mark in run.summary["marks"].items()]
    if marks and len(runs) == 1:
        yield Items(marks, "What the method did on the way")


def _curve(
    metric: str,
    lines: Mapping[str, Mapping[int, float]],
    styles: Mapping[str, LineStyle],
    split: str,
) -> Picture:
    label = f"{split} {CURVES[metric]}"
    ends = [f"{name} {line[max(line)]:.3f}" for name, line in lines.items()]
    more = f" and {len(ends) - _NAMED} more lines" if len(ends) > _NAMED else ""
    last = max(max(line) for line in lines.values())
    alt = f"{label} over {last} rounds. At the end: {', '.join(ends[:_NAMED])}{more}."
    svg = curves(f"curve-{metric}", lines, styles, label)
    return Picture(svg, alt, f"{label[0].upper()}{label[1:]}, by round.")


def _lines(runs: Sequence[ReportedRun], metric: str, split: str) -> dict[str, dict[int, float]]:
    """Return the lines of a metric: of one run by distribution, of several by experiment."""
    if len(runs) == 1:
        distribution_of = {s: str(f["distribution"]) for s, f in runs[0].run.silos.items()}
        return series(runs[0].run.metrics, metric, distribution_of, split)
    lines: dict[str, dict[int, float]] = {}
    for experiment, by_seed in experiments_of(runs).items():
        at: dict[int, list[float]] = {}
        for run in by_seed.values():
            alike = dict.fromkeys(run.run.silos, "all")
            for round_, value in (
                series(run.run.metrics, metric, alike, split).get("all", {}).items()
            ):
                at.setdefault(round_, []).append(value)
        if at:
            lines[experiment] = {round_: mean(values) for round_, values in sorted(at.items())}
    return lines


def _figures(runs: Sequence[ReportedRun], split: str) -> Iterator[Block]:
    yield Text(
        [f"Of the last round, on {split} samples; 'all' is the mean over sites, each alike."]
    )
    for experiment, by_seed in experiments_of(runs).items():
        summaries = {seed: of_split(run.summary, split) for seed, run in by_seed.items()}
        metrics = data_set(str(next(iter(by_seed.values())).summary["dataset"])).headline
        figures = over_seeds(experiment_results(experiment, summaries, metrics))
        if figures.empty:
            continue
        seeds = f"mean ± sd over {len(by_seed)} seeds" if len(by_seed) > 1 else "one seed"
        yield _figure_table(f"{experiment}, {seeds}", figures)
    if any(run.summary["published"] for run in runs):
        yield Text(["Published: the paper's own numbers, measured in its own setting."])


def _figure_table(caption: str, figures: Any) -> Table:
    metrics = list(figures["metric"].unique())
    published = set(figures.loc[figures["published"].notna(), "metric"])
    columns, rows = ["site or group"], []
    for metric in metrics:
        columns += [metric, *(["published"] if metric in published else [])]
    for group, part in figures.groupby("group", sort=False):
        by_metric = {figure.metric: figure for figure in part.itertuples()}
        row = [str(group)]
        for metric in metrics:
            figure = by_metric.get(metric)
            row.append(spread_cell(figure) if figure else NONE)
            if metric in published:
                row.append(published_cell(figure) if figure else "")
        rows.append(row)
    return Table(caption, columns, rows)


def _comparison(runs: Sequence[ReportedRun], split: str) -> list[Section]:
    """Return the section that compares experiments; none of one experiment alone."""
    experiments = experiments_of(runs)
    data_sets = {str(run.summary["dataset"]) for run in runs}
    if len(experiments) < 2:
        return []
    if len(data_sets) > 1:
        said = f"The runs are of several data sets ({', '.join(sorted(data_sets))})"
        return [Section("Comparison", [Text([f"{said}: their figures are not compared."])])]
    blocks: list[Block] = []
    for metric in data_set(data_sets.pop()).headline:
        samples = {
            name: {
                seed: value
                for seed, run in by_seed.items()
                if (value := figure_of(of_split(run.summary, split), "all", metric)) is not None
            }
            for name, by_seed in experiments.items()
        }
        if sum(bool(by_seed) for by_seed in samples.values()) > 1:
            blocks += _compared(metric, samples, split)
    return [Section("Comparison", [*blocks, *_what_tests_say(runs)])] if blocks else []


def _compared(
    metric: str, samples: Mapping[str, Mapping[int, float]], split: str
) -> Iterator[Block]:
    known = {name: by_seed for name, by_seed in samples.items() if by_seed}
    means = {
        name: Estimate(mean(by_seed.values()), of_mean(list(by_seed.values())))
        for name, by_seed in known.items()
    }
    label = f"{split} {metric}, mean over sites"
    said = "; ".join(f"{n}: {with_interval(e.value, e.interval)}" for n, e in means.items())
    points = {name: list(by_seed.values()) for name, by_seed in known.items()}
    svg = estimates(f"compared-{metric}", {"mean": means}, label, points)
    yield Pictures([Picture(svg, f"{label}. {said}.", f"{label}; bars: 95 % intervals (t).")])
    yield Table(
        f"{label[0].upper()}{label[1:]}",
        ["experiment", "seeds", "mean (95 % interval)"],
        [
            [name, str(len(known[name])), with_interval(e.value, e.interval)]
            for name, e in means.items()
        ],
    )
    tested = significance(metric, known, paired=_same_seeds(known))
    yield from _tests(tested, split)


def _tests(tested: Tested, split: str) -> Iterator[Block]:
    if tested.anova.p is None and all(outcome.p is None for outcome in tested.pairs.values()):
        yield Text([f"No test: {tested.anova.why}."])
        return
    columns, *rows = tested.lines()
    note = ". ".join([tested.heading(split), *tested.reasons()])
    yield Table(f"p of {tested.metric}, pair by pair", columns, rows, f"{note}.")


def _same_seeds(samples: Mapping[str, Mapping[int, float]]) -> bool:
    return len({tuple(sorted(by_seed)) for by_seed in samples.values()}) == 1


def _what_tests_say(runs: Sequence[ReportedRun]) -> Iterator[Block]:
    """Yield what a reader of intervals and p values must know."""
    experiments = experiments_of(runs)
    seeds = {name: by_seed.keys() for name, by_seed in experiments.items()}
    if max(len(found) for found in seeds.values()) < 2:
        yield Text(["One seed each: a difference may be one of seeds alone. Run more seeds."])
        return
    paired = len({tuple(sorted(found)) for found in seeds.values()}) == 1
    kind = "paired by seed" if paired else "unpaired"
    cuts = [{site: facts["fingerprints"] for site, facts in run.run.silos.items()} for run in runs]
    same = all(cut == cuts[0] for cut in cuts)
    yield Items(
        [
            f"p: two-sided t-tests, {kind}, times the number of pairs (Bonferroni). That several "
            "metrics are looked at is not corrected for.",
            "Intervals: Student's t over seeds, of each experiment alone; overlap is no test.",
            "All runs saw the same split: seeds vary initial weights and the order of batches, and "
            "neither p nor an interval tells anything of other patients."
            if same
            else "Splits differ between runs: seeds vary initial weights, the order of batches and "
            "the split. Training data overlap between splits, so p is too small.",
        ],
        "How to read intervals and p",
    )


def _cost(runs: Sequence[ReportedRun]) -> Iterator[Block]:
    rows = []
    for run in runs:
        seconds, bytes_ = run.summary["seconds"], run.summary["bytes"]
        peak = run.summary["peak-memory-bytes"].values()
        rows.append(
            [
                run.name,
                seconds_text(seconds["total"]),
                seconds_text(sum(seconds["sites"].values())),
                bytes_text(bytes_["down"]),
                bytes_text(bytes_["up"]),
                bytes_text(max(peak, default=0)),
            ]
        )
    columns = ["run", "duration", "work of all sites", "to the sites", "from them", "peak memory"]
    yield Table(
        "Seconds, bytes and memory",
        columns,
        rows,
        "Duration: from the first message to the last. Peak memory: the most that a site's process "
        "took, or of a GPU; simulated sites share a process.",
    )


def _failures(runs: Sequence[ReportedRun]) -> list[Block]:
    blocks: list[Block] = []
    for run in runs:
        if run.summary["failures"] or run.summary["stopped"]:
            blocks += [Text([f"{run.name}:"]), *failures(run)] if len(runs) > 1 else failures(run)
        if named := run.summary["unrepeatable-operations"]:
            said = "operations on a GPU that have no deterministic form were used"
            blocks.append(Text([f"{run.name}: {said}: {', '.join(named)}."]))
    return blocks or failures(runs[0])
