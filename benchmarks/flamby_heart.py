"""FLamby's Fed-Heart-Disease benchmark from its own starts: our runs, and a few lines of torch.

    python benchmarks/flamby_heart.py --data-dir DIR --csv docs/results/flamby-heart-starts.csv

A start is FLamby's layer of one logit (seeds 42 to 46); ours has two logits, of which the first
starts at 0, so that their difference is FLamby's. ``runs``: the experiments ``flamby-heart-*`` from
these starts. ``replica``: what FLamby's code does, written again: SGD or Adam on its split, batches
in another order. There are two of cyclic: its ``Cyclic`` trains a copy of the model at each centre,
hands none on and tests the first centre's. ``pooled`` is tested as it is there, by features that
are standardised at home, not as in its training, and by those of its training.
"""

import argparse
import contextlib
import io
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import load_silo
from fedsilo.engines.planning import RunSources, plan_run, start
from fedsilo.models.maths.standardisation import pooled_statistics, standardise, sums_of
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.config.settings import resolve

SITES = ("cleveland", "hungary", "switzerland", "va")
SEEDS = range(42, 47)
RUNS = ["fedavg", "fedprox", "scaffold", "fedadam", "fedyogi", "fedadagrad", "cyclic"]
RUNS += ["local", "mix"]
Accuracies = list[float]


def layer(seed: int) -> nn.Linear:
    """Return FLamby's network before its sigmoid; its columns are in our order."""
    torch.manual_seed(seed)
    return nn.Linear(13, 1)


@dataclass(frozen=True)
class Patients:
    """Features (n, 13), standardised, and labels (n, 1)."""

    inputs: Tensor
    labels: Tensor

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of four without end, each pass in another order."""
        rng = torch.Generator().manual_seed(seed)
        while True:
            for chosen in torch.randperm(len(self.labels), generator=rng).split(4):
                yield self.inputs[chosen], self.labels[chosen]

    def accuracy(self, model: nn.Module) -> float:
        """Return the share of patients that ``model`` has right."""
        with torch.no_grad():
            return ((model(self.inputs) > 0) == (self.labels > 0)).float().mean().item()


@dataclass(frozen=True)
class Hospitals:
    """Training and test patients of all hospitals, standardised at home or by all training rows."""

    train: list[Patients]
    test: list[Patients]

    def pooled(self) -> Patients:
        """Return all training patients."""
        parts = self.train
        return Patients(torch.cat([p.inputs for p in parts]), torch.cat([p.labels for p in parts]))


def hospitals(data_dir: str, at_home: bool) -> Hospitals:
    """Read the four files and cut them as FLamby does."""
    common = resolve({"dataset": "heart", "data.dir": data_dir}).common
    silos = [load_silo(site, common) for site in SITES]
    sums = [sums_of(silo.train.inputs) for silo in silos]
    found = Hospitals([], [])
    for silo, own in zip(silos, sums, strict=True):
        standardisation = pooled_statistics([own] if at_home else sums)
        for split, parts in ((silo.train, found.train), (silo.test, found.test)):
            parts.append(
                Patients(standardise(split.inputs, standardisation), split.labels[:, None] * 1.0)
            )
    return found


def train(
    model: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    optimiser: torch.optim.Optimizer,
) -> None:
    """Take ``steps`` optimiser steps."""
    for _ in range(steps):
        inputs, labels = next(batches)
        optimiser.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(inputs), labels).backward()
        optimiser.step()


def fedavg(homes: Hospitals, seed: int) -> Accuracies:
    """Return FedAvg's accuracies after 15 rounds of 100 steps of SGD at 0.001."""
    model, streams = layer(seed), [p.batches(100 * seed + k) for k, p in enumerate(homes.train)]
    counts = torch.tensor([float(len(p.labels)) for p in homes.train])
    for _ in range(15):
        trained = []
        for stream in streams:
            own = nn.Linear(13, 1)
            own.load_state_dict(model.state_dict())
            train(own, stream, 100, torch.optim.SGD(own.parameters(), 0.001))
            trained.append(nn.utils.parameters_to_vector(own.parameters()).detach())
        mean = (counts / counts.sum()) @ torch.stack(trained)
        nn.utils.vector_to_parameters(mean, model.parameters())
    return [p.accuracy(model) for p in homes.test]


def cyclic(homes: Hospitals, seed: int, handed_on: bool) -> Accuracies:
    """Return the accuracies after 15 visits of 100 steps at 0.01, or of the first centre's four."""
    model, order = layer(seed), list[int]()
    streams = [p.batches(100 * seed + k) for k, p in enumerate(homes.train)]
    optimiser, rng = torch.optim.SGD(model.parameters(), 0.01), np.random.default_rng(seed)
    for _ in range(15):
        order = order or rng.permutation(len(SITES)).tolist()
        site = order.pop()
        if handed_on or site == 0:
            train(model, streams[site], 100, optimiser)
    return [p.accuracy(model) for p in homes.test]


def alone(patients: Patients, seed: int) -> nn.Linear:
    """Return the model of 50 epochs of Adam at 0.001."""
    model = layer(seed)
    steps = 50 * -(-len(patients.labels) // 4)
    train(model, patients.batches(seed), steps, torch.optim.Adam(model.parameters(), 0.001))
    return model


def replica(data_dir: str) -> Iterator[tuple[str, int, Accuracies]]:
    """Yield name, seed and accuracies of FLamby's training."""
    homes, pool = hospitals(data_dir, True), hospitals(data_dir, False)
    for seed in SEEDS:
        yield "fedavg", seed, fedavg(homes, seed)
        yield "cyclic, not handed on", seed, cyclic(homes, seed, False)
        yield "cyclic, handed on", seed, cyclic(homes, seed, True)
        local = zip(homes.train, homes.test, strict=True)
        yield "local", seed, [test.accuracy(alone(own, seed)) for own, test in local]
        model = alone(pool.pooled(), seed)
        yield "pooled", seed, [p.accuracy(model) for p in homes.test]
        yield "pooled, tested as trained", seed, [p.accuracy(model) for p in pool.test]


def runs(data_dir: str) -> Iterator[tuple[str, int, Accuracies]]:
    """Yield experiment, seed and accuracies of our runs from FLamby's starts."""
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            weights, path = layer(seed).state_dict(), Path(folder) / f"{seed}.safetensors"
            both = {n: torch.cat([torch.zeros_like(w), w]) for n, w in weights.items()}
            save_file({f"head.1.{name}": array for name, array in both.items()}, path)
            changes = (f"train.initial-weights={path}", f"data.dir={data_dir}")
            sources = RunSources(changes=changes, out=Path(folder))
            for name in (f"flamby-heart-{method}" for method in RUNS):
                own = {"seed": seed, "run.name": f"{name}-{seed}"}
                settings, resources = plan_run(name, sources, overrides=own)
                with contextlib.redirect_stdout(io.StringIO()):
                    done = FinishedRun.open(start(settings, resources, "inline").path)
                yield name, seed, [done.summary["sites"][site]["accuracy"] for site in SITES]


def main() -> None:
    """Write and print mean and standard deviation of each method's accuracies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default=CommonSettings().data_dir)
    parser.add_argument("--csv", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [
        (kind, name, seed, site, accuracy)
        for kind, made in (("replica", replica), ("runs", runs))
        for name, seed, accuracies in made(arguments.data_dir)
        for site, accuracy in zip(SITES, accuracies, strict=True)
    ]
    table = pd.DataFrame(rows, columns=["kind", "method", "seed", "site", "accuracy"])
    groups = table.groupby(["kind", "method", "site"], sort=False)["accuracy"]
    found = groups.agg(mean="mean", sd="std", seeds="count").round(6)
    found.to_csv(arguments.csv)
    print(found.to_string())


if __name__ == "__main__":
    main()
