"""What a training step of ResNet-22 on radiographs costs: peak memory and seconds.

    python benchmarks/radiographs.py steps [--sizes 512,1024,2048] [--batch 4] [--width 16]
    python benchmarks/radiographs.py gpu [--size 2048] [--batch 4] [--csv FILE]  # on a GPU

A step is one of the app's own training (Adam, cross-entropy, two classes) on made-up int16 images.
Each row is a process of its own, whose peak memory it is: resident size, on a GPU what its tensors
took. The first step, which sets things up, is not timed; the least of the others is told.
"""

import argparse
import csv
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from fedsilo.client_app.training.compute import choose_compute
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.client_app.training.optimisers import open_optimiser
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import build
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape

_CLASSES = 2
_VALUES = {"method": "fedavg", "network.name": "resnet22", "train.local-steps": 1}
_HEADER = ("pixels", "batch", "at once", "checkpointing", "seconds", "peak MiB", "over start")


def one_step(options: argparse.Namespace) -> None:
    """Print seconds of a step, peak MiB and MiB before the first step, for this process."""
    values = {
        **_VALUES,
        "network.width": options.width,
        "train.batch-size": options.batch,
        "train.micro-batch": options.micro,
        "network.gradient-checkpointing": options.checkpointing,
        "machine.device": options.device,
        "machine.precision": options.precision,
        "machine.threads": options.threads,
    }
    settings = build(CommonSettings, values)
    compute = choose_compute(settings.device, settings.precision, settings.threads)
    rng = torch.Generator().manual_seed(0)
    shape = (options.batch, 1, options.size, options.size)
    images = torch.randint(-(2**15), 2**15, shape, generator=rng, dtype=torch.int16)
    split = Split(images, torch.arange(options.batch) % _CLASSES)
    network = build_classifier(settings, NetworkShape(shape[1:], _CLASSES))
    compute.place(network)
    optimiser = open_optimiser(network, settings)
    cuda, start, seconds = compute.device.type == "cuda", resident(), []
    for round_ in range(options.repeats + 1):
        began = time.perf_counter()
        key = (round_, "site")
        LocalTraining(network, split, settings, compute, key, optimiser=optimiser).run()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else resident()
    print(min(seconds[1:]), peak, 0.0 if cuda else start)


def resident() -> float:
    """Return the most MiB that this process has held."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def measured(size: int, micro: int, checkpointing: bool, options: argparse.Namespace) -> list[str]:
    """Return a row of the table, measured in a process of its own."""
    command = [sys.executable, __file__, "one", str(size), str(options.batch), str(micro)]
    command += ["--width", str(options.width), "--threads", str(options.threads)]
    command += ["--device", options.device, "--precision", options.precision]
    command += ["--repeats", str(options.repeats)]
    command += ["--checkpointing"] if checkpointing else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    row = [f"{size} x {size}", str(options.batch), str(micro or options.batch)]
    row.append("yes" if checkpointing else "no")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        killed = done.returncode < 0 or "out of memory" in done.stderr.lower()
        why = "out of memory" if killed else lines[-1] if lines else str(done.returncode)
        return [*row, "-", why, "-"]
    seconds, peak, start = map(float, done.stdout.split())
    return [*row, f"{seconds:.2f}", f"{peak:,.0f}", f"{peak - start:,.0f}"]


def line(cells: list[str] | tuple[str, ...]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def steps(options: argparse.Namespace) -> None:
    """Print a row per size, micro-batch and way of keeping values, as each is measured."""
    options.device, options.precision = "cpu", "fp32"
    print(line(_HEADER), line(["---"] * len(_HEADER)), sep="\n", flush=True)
    # No part of one image: batch norm of the head has no variance over it
    parts = [0, 2] if options.batch > 2 else [0]
    for size in options.sizes:
        for micro in parts:
            for checkpointing in (False, True):
                print(line(measured(size, micro, checkpointing, options)), flush=True)


def gpu(options: argparse.Namespace) -> None:
    """Print a row per precision and way of keeping values, on the GPU, and write them to a CSV.

    With ``--device cpu`` the rows are of the CPU, to try the command.
    """
    name = "CPU"
    if options.device != "cpu":
        if not torch.cuda.is_available():
            sys.exit("there is no usable GPU on this machine: run 'steps', which measures the CPU")
        name = torch.cuda.get_device_name()
    print(f"{name}, PyTorch {torch.__version__}")
    header = ("precision", *_HEADER)
    print(line(header), line(["---"] * len(header)), sep="\n", flush=True)
    rows = []
    for precision in ("fp32", "bf16"):
        options.precision = precision
        for checkpointing in (False, True):
            row = [precision, *measured(options.size, 0, checkpointing, options)]
            rows.append(row)
            print(line(row), flush=True)
    if options.csv:
        write_rows(options.csv, rows)


def write_rows(path: Path, rows: Sequence[Sequence[str]]) -> None:
    """Write the rows of ``gpu`` as CSV, numbers without separators of thousands."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("precision", *_HEADER))
        for row in rows:
            writer.writerow(cell.replace(",", "") for cell in row)


def sizes(text: str) -> list[int]:
    """Read '512,1024' as a list of sizes."""
    return [int(part) for part in text.split(",")]


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="timed steps (default 3)")


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    table = commands.add_parser("steps")
    table.add_argument("--sizes", type=sizes, default=[512, 1024, 2048], metavar="PIXELS,...")
    table.add_argument("--batch", type=int, default=4)
    table.set_defaults(run=steps)
    on_gpu = commands.add_parser("gpu")
    on_gpu.add_argument("--size", type=int, default=2048)
    on_gpu.add_argument("--batch", type=int, default=4)
    on_gpu.add_argument("--device", default="cuda")
    on_gpu.add_argument("--csv", type=Path, help="also write the rows to this file")
    on_gpu.set_defaults(run=gpu)
    one = commands.add_parser("one")
    for name in ("size", "batch", "micro"):
        one.add_argument(name, type=int)
    one.add_argument("--device", default="cpu")
    one.add_argument("--precision", default="fp32")
    one.add_argument("--checkpointing", action="store_true")
    one.set_defaults(run=one_step)
    for command in (table, on_gpu, one):
        _add_common(command)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
