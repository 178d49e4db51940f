"""What 'memory-format' saves on a CPU: milliseconds of an optimiser step, on one core.

    python benchmarks/memory_format.py [--csv FILE]

Formats alternate, turn by turn; a row is the median over all steps of a format.
"""

import argparse
import csv
import statistics
import time
from pathlib import Path

import torch

from fedsilo.client_app.training.compute import choose_compute
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task

FORMATS = ("contiguous", "channels-last")
JOBS: tuple[tuple[str, int, tuple[int, int, int]], ...] = (
    ("conv", 16, (1, 28, 28)),
    ("conv", 16, (1, 8, 8)),
    ("conv", 32, (3, 32, 32)),
    ("vgg16-bn", 16, (3, 32, 32)),
    ("resnet22", 16, (1, 64, 64)),
)


def step_seconds(
    network: str, width: int, shape: tuple[int, int, int], memory_format: str, steps: int
) -> list[float]:
    """Return the seconds of each step of Adam on batches of 32 random images."""
    compute = choose_compute("cpu", "fp32", 1, memory_format=memory_format)
    settings = CommonSettings(network=network, width=width)
    model = compute.place(build_classifier(settings, Task(shape, 10))).train()
    images, labels = compute.bring(torch.rand(32, *shape)), torch.arange(32) % 10
    optimiser, seconds = torch.optim.Adam(model.parameters()), []
    for _ in range(steps + 2):
        began = time.perf_counter()
        optimiser.zero_grad()
        model.loss(images, labels).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimiser.step()
        seconds.append(time.perf_counter() - began)
    return seconds[2:]


def main() -> None:
    """Measure each network in both formats, and print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    rows = []
    for network, width, shape in JOBS:
        found: dict[str, list[float]] = {one: [] for one in FORMATS}
        for _ in range(given.turns):
            for one in FORMATS:
                found[one] += step_seconds(network, width, shape, one, given.steps)
        medians = [1000 * statistics.median(found[one]) for one in FORMATS]
        size = "x".join(map(str, shape))
        rows.append([network, width, size, *(f"{m:.1f}" for m in medians)])
        rows[-1].append(f"{medians[0] / medians[1]:.2f}")
        print(*rows[-1])
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["network", "width", "image", *(f"{f} ms" for f in FORMATS), "ratio"])
            writer.writerows(rows)


if __name__ == "__main__":
    main()
