"""What a step of private training costs: one patient at a time, all together, without privacy.

    python benchmarks/private_step.py docs/results/private-step.csv

A row each for networks of three sizes: milliseconds of the processor for a step on 64 patients, the
least of several. 'alone' is a real hospital, 'together' a simulation, 'plain' training without
privacy; 'noise' is the part of 'alone' that draws whole numbers.
"""

import csv
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import TokenClassifier
from fedsilo.models.privacy.dp_sgd import clipped_gradients, noisy_mean
from fedsilo.models.privacy.release import UNITS, Release
from fedsilo.models.privacy.rounded_gaussian import rounded_normals

PATIENTS, TIMES = 64, 5
NETWORKS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "logistic": ({"network": "logistic"}, (13,)),
    "mlp": ({"network": "mlp", "width": 64}, (13,)),
    "conv": ({"network": "conv", "width": 4}, (1, 28, 28)),
}


def least(function: Callable[[], object]) -> float:
    """Return the least milliseconds of the processor that a function takes."""
    took = []
    for _ in range(TIMES):
        began = time.process_time()
        function()
        took.append(time.process_time() - began)
    return 1000 * min(took)


def step(network: TokenClassifier, inputs: torch.Tensor, labels: torch.Tensor, alone: bool) -> None:
    """Take the gradients of a private step."""
    release = Release(1.0, 1.0, 1, None if alone else torch.Generator().manual_seed(1))
    sums, _ = clipped_gradients(network, network.loss, inputs, labels, release)
    noisy_mean(sums, release, PATIENTS)


def row_of(name: str) -> dict[str, object]:
    """Measure a network of ``NETWORKS``."""
    settings, shape = NETWORKS[name]
    common = CommonSettings(dropout=0.0, sample_clip_norm=1.0, **settings)
    network = build_classifier(common, NetworkShape(shape, 2)).train()
    inputs, labels = torch.randn(PATIENTS, *shape), torch.arange(PATIENTS) % 2
    count = sum(p.numel() for p in network.parameters())
    took = {
        "plain": least(lambda: network.loss(inputs, labels).backward()),
        "together": least(lambda: step(network, inputs, labels, False)),
        "alone": least(lambda: step(network, inputs, labels, True)),
        "noise": least(lambda: rounded_normals(UNITS, count, None)),
    }
    shown = {key: f"{milliseconds:.2f}" for key, milliseconds in took.items()}
    return {"network": name, "numbers": count, **shown}


def main() -> None:
    """Measure, and write the rows."""
    torch.set_num_threads(1)
    rows = [row_of(name) for name in NETWORKS]
    with open(sys.argv[1], "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
