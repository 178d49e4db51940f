"""Run what is missing of a benchmark, and report the results.

For each experiment and method there are trials, then more seeds at the best point. All runs are in
this process. A trial is a run of each trial seed, and its validation metrics alone decide. The
chosen trial's runs are the first seeds' runs.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.ranking.config import RANKING_FILE, Benchmark, read_benchmark
from benchmarks.ranking.page import Benchmarked
from benchmarks.ranking.rows import Point, Row, Rows, best_point
from fedsilo.comparison.trials import run_and_forget
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import DataError, FedsiloError, SettingError, unknown_name
from fedsilo.core.methods import METHODS, known_defaults
from fedsilo.core.settings.removed import with_former_keys
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import data_fingerprint
from fedsilo.engines.planning import plan_run, planned_settings
from fedsilo.server_app.config.settings import RunSettings, resolve

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """An experiment of the benchmark: its settings, and a digest of its data."""

    name: str
    metric: str
    values: Mapping[str, Value]
    data: str


def benchmark(
    section: str,
    sources: RunSources,
    csv: Path,
    *,
    experiments: Sequence[str] = (),
    methods: Sequence[str] = (),
    only_show: bool = False,
    tell: Tell = lambda _: None,
) -> Benchmarked:
    """Run what is missing in ``csv``, which grows run by run, and return all that has run.

    These ``experiments`` and ``methods`` of the ``section`` in ranking.yaml are run now, all
    if none are named, and nothing if ``only_show``.

    Raises:
        FedsiloError: a name is unknown, data are missing, or the file has rows of other settings.
    """
    sources = replace(sources, file=sources.file or RANKING_FILE)
    declared = read_benchmark(sources.file or RANKING_FILE, section)
    for what, names, known in (
        ("experiment", experiments, declared.experiments),
        ("method", methods, METHODS),
    ):
        for name in names:
            if name not in known:
                raise unknown_name(what, name, known)
    rows = Rows.read(csv)
    if not only_show:
        chosen = list(experiments or declared.experiments)
        _run_all(declared, rows, sources, chosen, list(methods or METHODS), tell)
    settings = {name: planned_settings(name, sources) for name in declared.experiments}
    shown = {n: {"dataset": own.common.dataset, **unusual(own)} for n, own in settings.items()}
    return Benchmarked(section, declared, rows, shown)


def _run_all(
    declared: Benchmark,
    rows: Rows,
    sources: RunSources,
    experiments: Sequence[str],
    methods: Sequence[str],
    tell: Tell,
) -> None:
    """Run what is missing of ``experiments`` and ``methods``, and add its rows."""
    for name in experiments:
        base, _ = plan_run(name, sources)
        data = data_fingerprint(base.common)
        setting = Setting(name, declared.experiments[name], base.as_mapping(), data)
        for method in methods:
            contender = declared.contender(method)
            if contender.only and name not in contender.only:
                rows.add(Row(name, method, note=contender.otherwise))
                continue
            try:
                _contend(declared, setting, method, rows, tell)
            except SettingError as error:
                if any(row.cell == (name, method) and row.run for row in rows.rows):
                    raise
                rows.add(Row(name, method, note=str(error)))
                tell(f"{name}, {method}: not run: {error}")


@dataclass(frozen=True)
class _Contest:
    """One method on one experiment: its settings, and where its runs are kept."""

    setting: Setting
    method: str
    values: Mapping[str, Value]
    rows: Rows
    tell: Tell

    def run(self, seed: int, rate: float, own: Mapping[str, Value]) -> Row:
        """Return the run of a seed at a point; it is run only if the file does not have it."""
        point = {**own, "seed": seed, "train.learning-rate": rate}
        settings = resolve({**self.values, **point})
        row = Row(
            self.setting.name,
            self.method,
            seed,
            rate,
            ", ".join(f"{key}={value}" for key, value in own.items()),
            self.setting.metric,
            run=settings_digest(settings, self.setting.data),
        )
        return self.rows.found(row) or self.rows.add(_measured(row, settings, self.tell))


def _contend(declared: Benchmark, setting: Setting, method: str, rows: Rows, tell: Tell) -> None:
    """Run a method's trials, then the other seeds at the best point."""
    contender = declared.contender(method)
    first = {key: values[0] for key, values in contender.own.items()}
    own_settings = contender.settings_on(setting.name)
    values = {**setting.values, **own_settings, "method": method, "run.name": ""}
    contest = _Contest(setting, method, values, rows, tell)

    runs: list[Row] = []
    tried: dict[Point, Mapping[str, Value]] = {}

    def try_point(rate: float, own: Mapping[str, Value]) -> None:
        for seed in range(declared.trial_seeds):
            runs.append(contest.run(seed, rate, own))
        tried[runs[-1].point] = own

    rates, further = declared.trials(method)
    for rate in rates:
        try_point(rate, first)
    rate, _ = best_point(runs, declared.trial_seeds)
    for own in further:
        try_point(rate, own)
    best = best_point(runs, declared.trial_seeds)
    if any(row.note for row in runs if row.point == best):
        return  # all trials have failed, and their rows say why
    for seed in range(declared.trial_seeds, declared.seeds):
        contest.run(seed, best[0], tried[best])


def unusual(settings: RunSettings) -> dict[str, Value]:
    """Return the settings that a result depends on, of those that differ from their defaults.

    So a setting that is new, and off by default, leaves what has run as it is.
    """
    usual = known_defaults()
    return {key: value for key, value in settings.decisive().items() if value != usual[key]}


def settings_digest(settings: RunSettings, data: str) -> str:
    """Return 12 characters that change with the data and all settings that decide a result."""
    # By the names of 0.1, so that rows that were measured with it are found
    text = json.dumps([with_former_keys(unusual(settings)), data], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _measured(row: Row, settings: RunSettings, tell: Tell) -> Row:
    """Run ``settings`` and return the row with what was measured, or with what went wrong."""
    try:
        with run_and_forget(settings) as run:
            summary, traffic = run.summary, run.traffic_rows
    except DataError:
        raise
    except FedsiloError as error:
        row = replace(row, note=f"a run failed: {error}")
    else:
        means = summary["validation"]["mean"]
        if row.metric not in means:
            raise SettingError(f"its runs have no '{row.metric}', but {', '.join(means)}")
        row = replace(
            row,
            validation=means[row.metric],
            loss=means["loss"],
            test=summary["mean"][row.metric],
            accuracy=summary["mean"]["accuracy"],
            up=sum(int(one["bytes_up"]) for one in traffic),
            down=sum(int(one["bytes_down"]) for one in traffic),
            seconds=summary["seconds"]["total"],
            samples=sum(int(one["samples"]) for one in traffic),
            processor=summary["processor"],
        )
    metrics = row.note or f"validation {row.validation:.3f}, {row.seconds:.1f} s"
    point = f"{row.rate:g} {row.own}".rstrip()
    tell(f"{row.experiment}, {row.method}, seed {row.seed}, {point}: {metrics}")
    return row
