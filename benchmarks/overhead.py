"""What the engines cost: a run's wall time over that of the same local training, bare.

The bare loop trains the same networks on the same silos with the same threads, averages the
weights with torch, and measures the final model; no Flower, no messages, no checkpoints. The run
does all that through the app. Both leave the per-round evaluation out (``evaluate-every`` 0).

    python benchmarks/overhead.py --data-dir DIR [--rounds 3] [--width 16]

What comes before and after the rounds (meeting the sites; for Ray also SuperLink, bundle, Ray and
its actors; at the end curves and table) is named apart.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peer_job import silo, trained
from rich.console import Console
from rich.table import Table

from fedsilo.client_app.training.compute import choose_compute
from fedsilo.client_app.training.evaluation import measure
from fedsilo.datasets.registry import silo_names
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.exchanged import exchanged_arrays, load_exchanged
from fedsilo.server_app.config.experiments import find_experiment
from fedsilo.server_app.config.settings import RunSettings, resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.run.inline_engine import run_inline
from fedsilo.server_app.run.processes import app_folder
from fedsilo.server_app.run.ray_engine import run_with_ray


def bare_loop(settings: CommonSettings) -> float:
    """Return the seconds of the same local training in a plain PyTorch loop."""
    silos = [silo(number, settings) for number in range(len(silo_names(settings)))]
    compute = choose_compute(settings.device, settings.precision, settings.threads)
    task = silos[0].task
    weights = exchanged_arrays(build_classifier(settings, task))
    began = time.perf_counter()
    for round_ in range(settings.rounds):
        total: dict[str, torch.Tensor] = {}
        for number in range(len(silos)):
            own = trained(weights, number, round_, settings)
            for name, tensor in own.items():
                total[name] = total.get(name, 0) + tensor.double() / len(silos)
        weights = {name: tensor.float() for name, tensor in total.items()}
    final = build_classifier(settings, task)
    load_exchanged(final, weights)
    for data in silos:
        for split in (data.val, data.test):
            measure(final, split, settings, compute, ("bare",))
    return time.perf_counter() - began


def timed_run(
    run: Callable[[RunSettings], RunDirectory], settings: RunSettings
) -> tuple[float, float, float]:
    """Return start-up seconds, seconds of the rounds, and the largest client's peak memory."""
    began = time.perf_counter()
    summary = run(settings).read_json("summary.json")
    whole = time.perf_counter() - began
    rounds = summary["seconds"]["rounds"]
    return whole - rounds, rounds, max(summary["peak-memory-bytes"].values()) / 2**20


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--experiment", default="fedavg-mnist-cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=16)
    options = parser.parse_args()
    experiment = find_experiment(app_folder() / "simulation.yaml", options.experiment)
    table = Table(
        title=f"{options.experiment}, {options.rounds} rounds, width {options.width}",
        title_justify="left",
    )
    for column in ("engine", "start and end s", "rounds s", "rounds / bare", "peak MiB a client"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    with tempfile.TemporaryDirectory() as out:
        values = {
            **experiment.values,
            "data-dir": str(options.data_dir.resolve()),
            "out": out,
            "rounds": options.rounds,
            "width": options.width,
            "evaluate-every": 0,
        }
        settings = {name: resolve({**values, "run-name": name}) for name in ("inline", "ray")}
        bare_loop(resolve({**values, "rounds": 1}).common)  # warm: caches, memory, code paths
        bare = bare_loop(settings["inline"].common)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        table.add_row("bare loop", "", f"{bare:.1f}", "1.000", f"{peak:.0f}")
        silos = settings["inline"].common.silos
        engines: dict[str, Callable[[RunSettings], RunDirectory]] = {
            "inline": lambda wanted: run_inline(wanted, silos),
            "ray": lambda wanted: run_with_ray(wanted, {"num-supernodes": silos}),
        }
        for name, engine in engines.items():
            start, rounds, memory = timed_run(engine, settings[name])
            table.add_row(
                name, f"{start:.1f}", f"{rounds:.1f}", f"{rounds / bare:.3f}", f"{memory:.0f}"
            )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
