"""What a process gains that keeps the memory it frees: a training step's time and page faults.

    python benchmarks/freed_memory.py [--turns 3] [--csv FILE]

Steps of Adam on the network conv, one core, batches of 64 random images of 28 x 28, in a process of
its own for each row, with and without ``keep_freed_memory``, turn by turn.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import torch

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.freed_memory import keep_freed_memory
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape

_WARM, _STEPS = 20, 40


def measure(width: int, keeps: bool) -> str:
    """Return median milliseconds of a step, page faults a step, and the process's peak MiB."""
    torch.set_num_threads(1)
    if keeps:
        keep_freed_memory()
    compute = Compute(torch.device("cpu"), bf16=False, channels_last=True)
    network = compute.place(
        build_classifier(CommonSettings(width=width), NetworkShape((1, 28, 28), 10))
    )
    optimiser, seconds = torch.optim.Adam(network.parameters()), []
    images, labels = compute.bring(torch.rand(64, 1, 28, 28)), torch.arange(64) % 10
    for step in range(_WARM + _STEPS):
        if step == _WARM:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        began = time.perf_counter()
        optimiser.zero_grad(set_to_none=True)
        network.loss(images, labels).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimiser.step()
        seconds.append(time.perf_counter() - began)
    used = resource.getrusage(resource.RUSAGE_SELF)
    milliseconds = 1000 * statistics.median(seconds[_WARM:])
    faults = (used.ru_minflt - before) / _STEPS
    return f"{milliseconds:.1f} {faults:.0f} {used.ru_maxrss / 1024:.0f}"


def main() -> None:
    """Measure each width in turn, and print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--row", nargs=2, metavar=("WIDTH", "KEEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(measure(int(options.row[0]), options.row[1] == "True"))
        return
    rows = []
    for turn in range(1, options.turns + 1):
        for width in (4, 16):
            for keeps in (False, True):
                command = [sys.executable, __file__, "--row", str(width), str(keeps)]
                said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                rows.append((turn, width, keeps, *map(float, said.split())))
                print(*rows[-1], flush=True)
    names = ["turn", "width", "keeps", "ms a step", "faults a step", "peak MiB"]
    if options.csv:
        write_atomically(options.csv, pd.DataFrame(rows, columns=names).to_csv(index=False))


if __name__ == "__main__":
    main()
