"""What secure aggregation costs, compared with none: by simulation and over processes.

    python benchmarks/secure_aggregation.py [--rounds 5] [--sites 6] [--csv FILE]

FedAvg on digits, clipped, without noise: once as it is, once with ``secure-aggregation=secagg``. Of
each round: wall seconds, bytes of all sites both ways, and seconds that the sites worked at what
secure aggregation adds (keys, shares, unmasking). The processes are a server and as many hospitals
over TLS on the loopback; a phase there costs a message's way to the hospital and back.
"""

import argparse
import tempfile
from pathlib import Path

import pandas as pd

from fedsilo.core.arguments import RunSources
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.messages import SECURING
from fedsilo.core.processes import app_folder
from fedsilo.deployment import commands
from fedsilo.deployment import deployed_run as run
from fedsilo.deployment.deployment import read_deployment
from fedsilo.deployment.options import DeploymentOptions
from fedsilo.engines.experiments import find_experiment
from fedsilo.engines.inline_engine import run_inline
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory

_EXPERIMENT = "fedavg-digits"
_WAYS = ("none", "secagg")
_LOW = ("minimum-batch=1", "minimum-steps-per-reply=1")


def changes(way: str, sites: int, rounds: int) -> dict[str, str | int | float]:
    """Return the settings of a run."""
    return {
        "split.silos": sites,
        "rounds": rounds,
        "train.local-epochs": 1,
        "train.mc-passes": 0,
        "secure.clip-norm": 5.0,
        "server.evaluate-every": 0,
        "machine.device": "cpu",
        "machine.threads": 1,
        "secure.aggregation": way,
    }


def simulated(way: str, sites: int, rounds: int, out: Path) -> RunDirectory:
    """Run in this process."""
    values = find_experiment(app_folder() / "simulation.yaml", _EXPERIMENT).values
    own = {**values, **changes(way, sites, rounds), "run.out": str(out), "run.name": way}
    return run_inline(resolve(own), sites)


def costs(engine: str, way: str, directory: RunDirectory) -> dict[str, str | float]:
    """Return what a round cost; of bytes and sites' seconds the first, when all is cold, not."""
    traffic = pd.read_csv(directory.path / "traffic.csv")
    later = traffic[(traffic["round"] > 1) & traffic["phase"].isin(["train", *SECURING])]
    rounds = later["round"].nunique()
    added = later[later["phase"].isin(SECURING)]
    total = directory.read_json("summary.json")["seconds"]["rounds"]
    return {
        "engine": engine,
        "secure-aggregation": way,
        "wall seconds a round": round(total / int(traffic["round"].max()), 2),
        "kB down a round": round(later["bytes_down"].sum() / rounds / 1000, 1),
        "kB up a round": round(later["bytes_up"].sum() / rounds / 1000, 1),
        "sites' seconds a round, training": round(
            float(later[later["phase"] == "train"]["seconds"].sum()) / rounds, 3
        ),
        "of the added phases": round(float(added["seconds"].sum()) / rounds, 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sites", type=int, default=6)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        simulated("none", options.sites, 1, folder / "warm")  # imports, the data's cache
        for way in _WAYS:
            found = simulated(way, options.sites, options.rounds, folder)
            rows.append(costs("simulation", way, found))
        wanted: DeploymentOptions = {"sites": options.sites, "node_config": _LOW}
        commands.up(folder / "up", _EXPERIMENT, wanted, print)
        try:
            deployment = read_deployment(folder / "up")
            for way in _WAYS:
                changed = changes(way, options.sites, options.rounds)
                sources = RunSources(
                    out=deployment.runs, changes=tuple(f"{k}={v}" for k, v in changed.items())
                )
                path = run.run(_EXPERIMENT, deployment.folder, sources, print, name=way)
                rows.append(costs("processes", way, RunDirectory(path)))
        finally:
            commands.down(folder / "up")
    table = pd.DataFrame(rows)
    print(table.to_string(index=False))
    if options.csv:
        write_atomically(options.csv, table.to_csv(index=False, lineterminator="\n"))


if __name__ == "__main__":
    main()
