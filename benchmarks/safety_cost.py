"""What a hospital's floors cost: accuracy and seconds of every method, without and with them.

    nice python benchmarks/safety_cost.py --data-dir DATA --csv docs/results/safety.csv

Without: sites of a simulation, which have no floors. With: the same silos as real sites under their
defaults (docs/site-file.md), by the in-process engine. Means are over the sites that report test
data in both. A method that a floor refuses is a line with the reason.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedsilo.datasets.registry import silo_names
from fedsilo.models.contract.errors import FedsiloError
from fedsilo.models.contract.methods import METHODS
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.config.settings import RunSettings, resolve
from fedsilo.server_app.run.inline_engine import InlineGrid, flower_identity, partition_configs

DIGITS: dict[str, Value] = {
    "dataset": "digits",
    "silos": 3,
    "silo-train-size": 200,
    "silo-test-size": 100,
    "rounds": 8,
    "local-epochs": 1,
    "batch-size": 16,
    "width": 8,
    "learning-rate": 3e-3,
}
HEART: dict[str, Value] = {
    "dataset": "heart",
    "network": "mlp",
    "width": 16,
    "standardise": "pooled",
    "rounds": 12,
    "local-epochs": 1,
    "batch-size": 16,
    "learning-rate": 3e-3,
}
SMALL: dict[str, Value] = {"mc-passes": 5, "device": "cpu", "evaluate-every": 0}
VIT: dict[str, Value] = {
    "network": "vit",
    "backbone-weights": "random",
    "backbone-width": 32,
    "backbone-depth": 2,
    "backbone-heads": 2,
    "backbone-patch": 4,
    "prompt-length": 4,
    "basic-layers": 1,
}
# What a method needs for its phases to happen within so few rounds
NEEDS: dict[str, dict[str, Value]] = {
    "uefl": {
        "uefl.iteration-rounds": 5,
        "uefl.extension-rounds": 2,
        "uefl.gamma": 0.1,
        "uefl.max-iterations": 1,
        "uefl.codes": 16,
    },
    "fedaligncl": {
        "epoch-steps": 10,
        "pace": 5,
        "local-epochs": 2,
        "batch-size": 32,
        "fedaligncl.warmup-epochs": 1,
    },
    "fedavg-ft": {"fedavg-ft.finetune-rounds": 2},
    "fedevprompt": VIT | {"fedevprompt.buffer-maps": 2},
    "picsr": {"picsr.expert-rounds": 5},
}
FIELDS = ("data", "method", "seed", "bounds", "accuracy", "seconds", "sites", "why")


def node_configs(settings: RunSettings, home: Path) -> list[dict[str, Value]]:
    """Return the node configs of real sites, with nothing said but who they are and where."""
    data = settings.common.data_dir
    return [
        {
            "site": name,
            "state-dir": str(home / name),
            "trust": "server",
            "data-dir": data,
            "cache-dir": settings.common.cache_dir,
            "allow-embeddings": True,
            "allow-folds": settings.common.val_folds > 0,
        }
        for name in silo_names(settings.common)
    ]


def run_once(values: dict[str, Value], real: bool, folder: Path) -> tuple[dict[str, float], float]:
    """Return the test accuracy of each site that tells it, and the seconds of a run."""
    from fedsilo.client_app.app import app
    from fedsilo.server_app.run.runner import run

    settings = resolve(values | {"out": str(folder / "runs"), "run-name": "run"})
    names = silo_names(settings.common)
    configs = node_configs(settings, folder) if real else partition_configs(len(names))
    began = time.monotonic()
    with flower_identity():
        grid = InlineGrid(app, settings.as_mapping(), configs)
        summary = run(grid, settings, {}).read_json("summary.json")
    accuracy = {site: found["accuracy"] for site, found in summary["sites"].items()}
    return accuracy, time.monotonic() - began


def measured(data: str, method: str, seed: int, values: dict[str, Value]) -> Iterator[list[Any]]:
    """Yield the two lines of one method on one data set with one seed."""
    found: dict[bool, tuple[dict[str, float], float]] = {}
    why = ""
    for real in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[real] = run_once(values, real, Path(folder))
            except FedsiloError as error:
                why = " ".join(str(error).split())[:200]
                break
    common = set.intersection(*(set(accuracy) for accuracy, _ in found.values())) if found else ()
    for real, (accuracy, seconds) in found.items():
        mean = statistics.mean(accuracy[site] for site in common) if common else float("nan")
        bounds = "defaults" if real else "none"
        yield [data, method, seed, bounds, round(mean, 4), round(seconds, 2), len(common), ""]
    if why:
        yield [data, method, seed, "defaults" if found else "none", "", "", "", why]


def table(path: Path) -> str:
    """Return the lines of a CSV as a table: mean accuracy and seconds over the seeds."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["accuracy"]]
    lines = ["| method | data | without | with | seconds |", "|---|---|---|---|---|"]
    for data, method in sorted({(row["data"], row["method"]) for row in rows}, reverse=True):
        cells = []
        for bounds in ("none", "defaults"):
            own = [
                r for r in rows if (r["data"], r["method"], r["bounds"]) == (data, method, bounds)
            ]
            values = [float(row["accuracy"]) for row in own]
            seconds = statistics.mean(float(row["seconds"]) for row in own) if own else float("nan")
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            mean = statistics.mean(values) if values else float("nan")
            cells.append((f"{mean:.3f} ± {spread:.3f}", f"{seconds:.0f}"))
        (before, slow), (after, slower) = cells
        lines.append(f"| {method} | {data} | {before} | {after} | {slow}, {slower} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and write a CSV, line by line; print it as a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--data", nargs="*", default=["heart", "digits"])
    parser.add_argument("--methods", nargs="*", default=sorted(set(METHODS) - {"mix"}))
    given = parser.parse_args()
    cache = tempfile.mkdtemp()
    with given.csv.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for data in given.data:
            base = {"heart": HEART, "digits": DIGITS}[data]
            for method in given.methods:
                for seed in range(given.seeds):
                    own = {"method": method, "seed": seed, "data-dir": given.data_dir}
                    values = base | SMALL | NEEDS.get(method, {}) | own | {"cache-dir": cache}
                    writer.writerows(measured(data, method, seed, values))
                    file.flush()
    print(table(given.csv))


if __name__ == "__main__":
    main()
