"""The authors' UEFL code next to ours: the same tensors, network, initial weights and steps.

    git clone https://github.com/destiny301/uefl DIR
    python benchmarks/authors.py --uefl DIR --data-dir DATA [--dataset fmnist] [--csv FILE]

The authors' ``train.main`` runs as it is: their outer loop, local training, averaging, codebook and
K-means. It gets our silos, and our encoder and head in place of theirs, with the seed's weights, so
that only the method's code differs. Their loop has no last round: this script ends it after
``--rounds``. Accuracy is that of the final model on each silo's test samples, and its mean.

Nothing of theirs is in this repository. Their modules that load data sets need OpenCV and
idx2numpy; this script replaces them, so that neither package has to be installed.
"""

import argparse
import csv
import sys
import tempfile
import types
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedsilo.client_app.training.initial_network import initial_classifier
from fedsilo.core.settings_schema import Value
from fedsilo.datasets.registry import load_silo, silo_names
from fedsilo.datasets.silo.silos import Silo
from fedsilo.engines.inline_engine import run_inline
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.site_network import TokenClassifier
from fedsilo.server_app.config.settings import RunSettings, resolve


class _LastRound(Exception):
    """The authors' loop has run as many rounds as it should."""


class _Head(nn.Module):
    """Our head, which reads token by token, behind the authors' flattened maps (batch, c * l)."""

    def __init__(self, network: TokenClassifier) -> None:
        super().__init__()
        self.head, self.channels = network.head, network.channels

    def forward(self, flat: Tensor) -> Tensor:
        maps = flat.reshape(len(flat), self.channels, -1)
        logits: Tensor = self.head(maps.transpose(1, 2).flatten(1))
        return logits


def settings_of(given: argparse.Namespace, method: str, more: Mapping[str, Value]) -> RunSettings:
    """Return the run settings of both sides."""
    values: dict[str, Value] = {
        "method": method,
        "dataset": given.dataset,
        "data.dir": str(given.data_dir),
        "network.name": "conv",
        "network.width": given.width,
        "split.silos": given.silos,
        "split.silo-train-size": given.samples,
        "split.silo-test-size": given.samples // 4,
        "split.val-folds": 0,
        "rounds": given.rounds,
        "train.local-epochs": given.epochs,
        "train.batch-size": given.batch,
        "train.learning-rate": given.rate,
        "seed": given.seed,
        "network.dropout": 0.1,
    }
    return resolve({**values, **more})


def tensors(silo: Silo, split: str) -> TensorDataset:
    """Return a split as float images (n, channels, height, width) with labels."""
    samples = silo.splits()[split]
    return TensorDataset(float_inputs(samples.inputs), samples.labels)


def authors(given: argparse.Namespace, settings: RunSettings) -> dict[str, float]:
    """Run the authors' loop on our silos and network; return the test accuracy by site."""
    common = settings.common
    silos = [load_silo(site, common) for site in silo_names(common)]
    tests = [tensors(silo, "test") for silo in silos]
    loader = types.ModuleType("dataset.build_datasets")
    trains = [tensors(silo, "train") for silo in silos]
    loader.build_slios = lambda args: (trains, tests)  # type: ignore[attr-defined]
    sys.modules["dataset.build_datasets"] = loader
    sys.path.insert(0, str(given.uefl))
    train = __import__("train")
    theirs = train.UEFL

    def build(**options: Any) -> nn.Module:
        model: Any = theirs(**options)
        network = initial_classifier(common, silos[0])
        model.encoder, model.classifier = network.encoder, _Head(network)
        return model  # type: ignore[no-any-return]

    found: list[list[float]] = []

    def entropy(predictions: np.ndarray) -> Any:
        classes = predictions.mean(axis=0).argmax(axis=-1)
        labels = [test.tensors[1].numpy() for test in tests]
        found.append([float((c == t).mean()) for c, t in zip(classes, labels, strict=True)])
        print(f"authors, round {len(found)}: {np.mean(found[-1]):.3f}", flush=True)
        if len(found) == given.rounds:
            raise _LastRound
        return measure(predictions)

    measure, train.UEFL, train.entropy = train.entropy, build, entropy
    torch.manual_seed(given.seed)
    options = {
        "dev": "cpu", "num_silo": len(silos), "num_dist": 3, "data": given.dataset,
        "encoder": "cnn", "dim": given.width, "depth": 3, "num_codes": given.codes, "seg": 1,
        "ema": False, "round": given.iteration, "round_plus": given.extension,
        "epoch": given.epochs, "step": 1, "batchsz": given.batch, "batchte": 100, "lr": given.rate,
        "gamma": 0.1, "thd": given.gamma, "min": True, "plot": False,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        options["workdir"] = folder
        with suppress(_LastRound):
            train.main(argparse.Namespace(**options))
    if len(found) < given.rounds:
        print(f"the authors' loop ended after {len(found)} rounds: no silo was uncertain")
    return dict(zip(silo_names(common), found[-1], strict=True))


def ours(settings: RunSettings) -> dict[str, float]:
    """Run ours; return the test accuracy by site."""
    rows = run_inline(settings, settings.common.silos).read_csv("metrics.csv")
    last = max(int(row["round"]) for row in rows)
    return {
        row["site"]: float(row["value"])
        for row in rows
        if int(row["round"]) == last and (row["split"], row["metric"]) == ("test", "accuracy")
    }


def main() -> None:
    """Run both and print, or write, a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--uefl", type=Path, required=True, help="checkout of the authors' code")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--dataset", default="fmnist", choices=("mnist", "fmnist"))
    parser.add_argument("--csv", type=Path)
    numbers = {
        "silos": 9, "samples": 500, "width": 8, "codes": 32, "rounds": 9, "iteration": 3,
        "extension": 3, "epochs": 1, "batch": 32, "seed": 1,
    }  # fmt: skip
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=0.002)
    parser.add_argument("--gamma", type=float, default=0.1)
    given = parser.parse_args()
    own: dict[str, Value] = {
        "uefl.codes": given.codes,
        "uefl.gamma": given.gamma,
        "uefl.iteration-rounds": given.iteration,
        "uefl.extension-rounds": given.extension,
        "uefl.max-iterations": 1 + given.rounds // max(1, given.extension),
        "uefl.stop-when-certain": False,
        "train.mc-passes": 20,
    }
    with tempfile.TemporaryDirectory() as out:
        uefl = settings_of(given, "uefl", {**own, "run.out": out, "run.name": "uefl"})
        fedavg = settings_of(given, "fedavg", {"run.out": out, "run.name": "fedavg"})
        by_row = {
            "authors' UEFL": authors(given, uefl),
            "our UEFL": ours(uefl),
            "our FedAvg": ours(fedavg),
        }
    rows = [
        {"row": row, "seed": given.seed, **sites, "all": sum(sites.values()) / len(sites)}
        for row, sites in by_row.items()
    ]
    for row in rows:
        print(f"{row['row']:14} {row['all']:.3f}")
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
