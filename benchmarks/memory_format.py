"""What 'machine.memory-format' saves on a CPU: milliseconds of an optimiser step, on one core.

    python benchmarks/memory_format.py [--csv FILE]

Formats alternate, turn by turn; a row is the median over all steps of a format. With
``ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2`` it is of the kernels without AVX-512.
"""

import argparse
import statistics
import time
from pathlib import Path

import pandas as pd
import torch

from fedsilo.client_app.training.compute import choose_compute
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape

FORMATS = ("contiguous", "channels-last")
JOBS: tuple[tuple[str, int, tuple[int, int, int]], ...] = (
    ("conv", 4, (1, 28, 28)),
    ("conv", 8, (1, 28, 28)),
    ("conv", 8, (3, 32, 32)),
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
    model = compute.place(build_classifier(settings, NetworkShape(shape, 10))).train()
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
        medians = {one: round(1000 * statistics.median(found[one]), 1) for one in FORMATS}
        rows.append(
            {
                "network": network,
                "width": width,
                "image": "x".join(map(str, shape)),
                **{f"{one} ms": milliseconds for one, milliseconds in medians.items()},
                "ratio": round(medians["contiguous"] / medians["channels-last"], 2),
                "kernels": torch.backends.cpu.get_cpu_capability(),
            }
        )
        print(*rows[-1].values(), flush=True)
    if given.csv:
        write_atomically(given.csv, pd.DataFrame(rows).to_csv(index=False))


if __name__ == "__main__":
    main()
