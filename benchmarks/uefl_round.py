"""What UEFL's rounds and its refresh cost, compared with FedAvg's rounds of the same network.

Both are run by the inline engine on the same silos, with the same threads; what a site works at a
message is what its own clock says (traffic.csv). The two methods take turns, so that a machine that
others use too slows both alike.

    python benchmarks/uefl_round.py --data-dir DIR [--experiment NAME] [--turns 3] [--csv FILE]

The quotients: a UEFL training round over FedAvg's, and what the end of an iteration adds (the check
of uncertainty; the centroids, by which books are laid) over a training round of UEFL.
"""

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.messages import TRAIN
from fedsilo.core.processes import app_folder
from fedsilo.core.settings_schema import Value
from fedsilo.engines.experiments import find_experiment
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.methods.uefl import CENTROIDS, UNCERTAINTY

_ROUNDS = 3  # of which the first is not counted: memory and code paths are cold
_UEFL: Mapping[str, Value] = {
    "uefl.iteration-rounds": 1,
    "uefl.extension-rounds": 1,
    "uefl.max-iterations": _ROUNDS,
    "uefl.stop-when-certain": False,
    "uefl.refresh": "kmeans",
}


def seconds_by_phase(values: Mapping[str, Value], out: Path) -> dict[str, float]:
    """Run, and return the mean over rounds after the first of all sites' seconds, by phase."""
    settings = resolve({**values, "run.out": str(out)})
    rows = run_inline(settings, settings.common.silos).read_csv("traffic.csv")
    spent: dict[tuple[str, int], float] = defaultdict(float)
    for row in rows:
        spent[row["phase"], int(row["round"])] += float(row["seconds"])
    return {
        phase: statistics.mean(
            seconds for (name, round_), seconds in spent.items() if name == phase and round_ > 1
        )
        for phase in {name for name, round_ in spent if round_ > 1}
    }


def values_of(method: str, experiment: Mapping[str, Value], data_dir: Path) -> dict[str, Value]:
    """Return an experiment's settings for a few rounds of ``method`` that measure nothing."""
    common = {key: value for key, value in experiment.items() if "." not in key}
    own = {key: value for key, value in experiment.items() if key.startswith("uefl.")}
    few: dict[str, Value] = {
        "rounds": _ROUNDS,
        "server.evaluate-every": 0,
        "data.dir": str(data_dir),
    }
    uefl: dict[str, Value] = {**own, **_UEFL} if method == "uefl" else {}
    return {**common, **few, **uefl, "method": method}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--experiment", default="uefl-table3-cifar10-uefl-cpu")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    experiment = find_experiment(app_folder() / "simulation.yaml", options.experiment).values
    measured: dict[str, list[dict[str, float]]] = {"fedavg": [], "uefl": []}
    with tempfile.TemporaryDirectory() as out:
        for turn in range(options.turns):
            for method, found in measured.items():
                values = values_of(method, experiment, options.data_dir.resolve())
                named = {**values, "run.name": f"{method}-{turn}"}
                found.append(seconds_by_phase(named, Path(out)))
    turns = enumerate(zip(*measured.values(), strict=True), start=1)
    rows = pd.DataFrame(_row(turn, *both) for turn, both in turns)
    table = Table(title=f"{options.experiment}, seconds of all sites a round", title_justify="left")
    for name in map(str, rows):
        table.add_column(name, justify="right")
    for row in rows.itertuples(index=False):
        table.add_row(*map(str, row))
    Console(width=100).print(table)
    if options.csv:
        write_atomically(options.csv, rows.to_csv(index=False))


def _row(turn: int, fedavg: Mapping[str, float], uefl: Mapping[str, float]) -> dict[str, str]:
    base, trained = fedavg[TRAIN], uefl[TRAIN]
    return {
        "turn": str(turn),
        "FedAvg": f"{base:.1f}",
        "UEFL": f"{trained:.1f}",
        "UEFL / FedAvg": f"{trained / base:.2f}",
        "check / round": f"{uefl[UNCERTAINTY] / trained:.2f}",
        "centroids / round": f"{uefl[CENTROIDS] / trained:.2f}",
    }


if __name__ == "__main__":
    main()
