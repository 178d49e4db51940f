"""FedAvg's validation metrics over three times a benchmark's rounds, by which its size was chosen.

    python -m benchmarks.ranking.pilots --csv benchmark-pilots.csv benchmark-mnist

An experiment has enough rounds if FedAvg, at its best learning rate, is then within two points of
its plateau, which is the best mean over seeds in any round at any rate. Pilots read validation
data only. Each line of the file is one run; what the file has is not run again.
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.ranking.config import RANKING_FILE, read_benchmark
from fedsilo.comparison.trials import run_and_forget
from fedsilo.core.arguments import RunSources
from fedsilo.core.errors import FedsiloError, error_line
from fedsilo.core.settings_schema import Value
from fedsilo.engines.planning import plan_run
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import resolve

_TIMES = 3  # the rounds of a pilot are these times the benchmark's
_POINTS = 4  # measurements within the benchmark's rounds


@dataclass(frozen=True)
class Pilot:
    """One run of FedAvg on an experiment.

    Attributes:
        rounds: the benchmark's rounds; the pilot has three times as many.
        steps: the optimiser steps of a site in a round.
        metric: the metric that decides; its values are means over sites on validation data.
        chance: what a classifier without any knowledge has.
        curve: the metric after the measured rounds, such as "5:0.71 10:0.78".
    """

    experiment: str
    rounds: int
    steps: int
    rate: float
    seed: int
    metric: str
    chance: float
    curve: str
    processor: str

    @property
    def values(self) -> dict[int, float]:
        """The metric by round."""
        pairs = (point.split(":") for point in self.curve.split())
        return {int(number): float(value) for number, value in pairs}


_TYPES: Mapping[str, Any] = {
    "rounds": int,
    "steps": int,
    "rate": float,
    "seed": int,
    "chance": float,
}


def read_pilots(path: Path) -> list[Pilot]:
    """Read all pilots of a file; an empty list if there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    pilots = []
    for line in lines:
        pilots.append(Pilot(**{key: _TYPES.get(key, str)(text) for key, text in line.items()}))
    return pilots


@dataclass(frozen=True)
class Size:
    """The size of an experiment by its pilots; metrics are from 0 to 1.

    Attributes:
        reached: FedAvg's mean after the benchmark's rounds at its best rate.
        plateau: the best mean after any measured round at any rate.
        chance: what a classifier without any knowledge has.
        seeds: the number of seeds.
    """

    reached: float
    plateau: float
    chance: float
    seeds: int


def sizes(pilots: Sequence[Pilot]) -> dict[str, Size]:
    """Return for each experiment how near FedAvg is to its plateau; newer sizes replace older."""
    found = {}
    for name in dict.fromkeys(pilot.experiment for pilot in pilots):
        newest = [pilot for pilot in pilots if pilot.experiment == name][-1]
        size = (name, newest.rounds, newest.steps)
        own = [one for one in pilots if (one.experiment, one.rounds, one.steps) == size]
        found[name] = _size(own)
    return found


def _size(pilots: Sequence[Pilot]) -> Size:
    curves: dict[tuple[float, int], list[float]] = {}
    for pilot in pilots:
        for number, value in pilot.values.items():
            curves.setdefault((pilot.rate, number), []).append(value)
    means = {point: sum(values) / len(values) for point, values in curves.items()}
    at_end = [mean for (_, number), mean in means.items() if number == pilots[0].rounds]
    seeds = len({pilot.seed for pilot in pilots})
    return Size(max(at_end), max(means.values()), pilots[0].chance, seeds)


def run_pilots(
    path: Path, experiments: Sequence[str], seeds: int, rates: Sequence[float] = ()
) -> Iterator[Pilot]:
    """Run the pilots that the file lacks, append each to it, and yield it.

    Args:
        path: the CSV file.
        experiments: names of the benchmark's experiments; all if empty.
        seeds: the number of seeds, from 0.
        rates: learning rates; those of the benchmark if empty.
    """
    declared = read_benchmark(RANKING_FILE, "benchmark")
    known = read_pilots(path)
    for name in experiments or declared.experiments:
        base, _ = plan_run(name, RunSources(file=RANKING_FILE))
        values, metric = base.as_mapping(), declared.experiments[name]
        size = int(values["rounds"]), int(values["train.local-steps"])  # type: ignore[arg-type]
        for rate in rates or declared.rates:
            for seed in range(seeds):
                key = (name, *size, rate, seed)
                if key not in [(p.experiment, p.rounds, p.steps, p.rate, p.seed) for p in known]:
                    yield _append(path, _run(key, metric, values))


def _run(key: tuple[str, int, int, float, int], metric: str, values: Mapping[str, Value]) -> Pilot:
    name, rounds, steps, rate, seed = key
    own: dict[str, Value] = {
        "rounds": _TIMES * rounds,
        "server.evaluate-every": rounds // _POINTS,
        "train.learning-rate": rate,
        "seed": seed,
        "run.name": "",
    }
    with run_and_forget(resolve({**values, **own})) as run:
        points = [f"{number}:{value:.4f}" for number, value in _curve(run, metric).items()]
        chance, processor = _chance(run, metric), run.summary["processor"]
    return Pilot(name, rounds, steps, rate, seed, metric, chance, " ".join(points), processor)


def _curve(run: FinishedRun, metric: str) -> dict[int, float]:
    """Return the mean over sites on validation data by round."""
    values: dict[int, list[float]] = {}
    for row in run.metric_rows:
        if (row["split"], row["metric"]) == ("val", metric):
            values.setdefault(int(row["round"]), []).append(float(row["value"]))
    return {number: sum(own) / len(own) for number, own in values.items()}


def _chance(run: FinishedRun, metric: str) -> float:
    """Return 0.5 for the AUC, otherwise the mean over sites of the largest class's share."""
    if metric == "auc":
        return 0.5
    counts = [facts["label_counts"]["val"] for facts in run.silos.values()]
    return round(sum(max(own) / sum(own) for own in counts) / len(counts), 4)


def _append(path: Path, pilot: Pilot) -> Pilot:
    new = not path.is_file()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Pilot)], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(asdict(pilot))
    return pilot


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and print how near FedAvg is to its plateau."""
    parser = argparse.ArgumentParser("python -m benchmarks.ranking.pilots", description=__doc__)
    parser.add_argument("experiments", nargs="*", help="some of the benchmark's experiments")
    parser.add_argument("--csv", type=Path, default=Path("benchmark-pilots.csv"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="some learning rates")
    given = parser.parse_args(arguments)
    try:
        for pilot in run_pilots(given.csv, given.experiments, given.seeds, given.rates):
            print(
                f"{pilot.experiment}, {pilot.rate:g}, seed {pilot.seed}: {pilot.curve}", flush=True
            )
    except FedsiloError as error:
        print(error_line(error), file=sys.stderr)
        return 1
    for name, size in sizes(read_pilots(given.csv)).items():
        print(
            f"{name}: FedAvg has {size.reached:.3f} at the benchmark's size, at its plateau "
            f"{size.plateau:.3f}, chance is {size.chance:.3f} ({size.seeds} seeds)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
