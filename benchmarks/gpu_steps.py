"""What local training costs on a GPU over a bare PyTorch loop: milliseconds of an optimiser step.

    python benchmarks/gpu_steps.py [--csv FILE] [--device cuda] [--turns 2] [--modes] [--small]

Both train the same network by Adam on random images of one silo, which is on the device. The bare
loop draws its order there and asks for nothing until its last step has ended. ``ours`` is the
training of a site (``LocalTraining``), with deterministic operations, as in every run, ``fused``
the same with 'machine.fused-optimiser'. Turns alternate; a row has the least of each. ``--modes``
measures only UEFL's network at the paper's size, by settings that change no mathematics. ``--device
cpu --small`` tries all jobs with small batches where there is no GPU.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from fedsilo.client_app.training.compute import Compute, choose_compute
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value, build
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import SiteNetwork

_CLASSES, _IMAGES = 10, 4096
# Network, width, image, batch, optimiser steps
JOBS: tuple[tuple[str, int, tuple[int, int, int], int, int], ...] = (
    ("conv", 16, (1, 28, 28), 64, 40),
    ("conv", 128, (1, 28, 28), 1024, 5),
    ("vgg16-bn", 64, (3, 32, 32), 64, 40),
    ("resnet22", 16, (1, 256, 256), 16, 20),
    ("vit", 16, (3, 224, 224), 32, 15),
    # Frozen, with prompts, as FedEvPrompt trains it
    ("vit-prompts", 16, (3, 224, 224), 32, 20),
    ("vit-prompts", 16, (3, 224, 224), 128, 20),
)
_PAPERS_SIZE = JOBS[1]
# 'machine.deterministic' and 'machine.memory-format'; the defaults are first
MODES = (("warn", "auto"), ("false", "auto"), ("warn", "contiguous"), ("false", "contiguous"))
_VIT: dict[str, Value] = {"network.name": "vit", "vit.backbone-weights": "random"}
_OF_VIT: dict[str, dict[str, Value]] = {
    "vit": {**_VIT, "vit.train-backbone": True},
    "vit-prompts": _VIT,
}
_SMALL_VIT: dict[str, Value] = {"vit.backbone-width": 48, "vit.backbone-depth": 4}
_SMALL_VIT |= {"vit.backbone-heads": 3}


def bare(
    network: SiteNetwork, split: Split, compute: Compute, batch: int, steps: int
) -> Callable[[], object]:
    """Return a training of ``steps`` batches, written out in PyTorch."""
    inputs, labels = compute.bring(split.inputs), compute.bring(split.labels)

    def train() -> None:
        network.train()
        trained = [one for one in network.parameters() if one.requires_grad]
        optimiser = torch.optim.Adam(trained, lr=1e-4)
        taken = 0
        while taken < steps:
            order = torch.randperm(len(labels), device=compute.device)
            for rows in order.split(batch)[: steps - taken]:
                optimiser.zero_grad()
                with compute.autocast():
                    loss = network.loss(float_inputs(inputs[rows]), labels[rows])
                loss.backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
                optimiser.step()
                taken += 1
        loss.item()

    return train


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds of ``work`` and of all that it left the device to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def row(
    job: tuple[str, int, tuple[int, int, int], int, int],
    precision: str,
    mode: tuple[str, str],
    given: argparse.Namespace,
) -> dict[str, object]:
    """Return a row of the table: a job in a precision, by one of ``MODES``."""
    name, width, shape, batch, steps = job
    if given.small:
        width, shape, batch, steps = min(width, 16), (*shape[:1], 32, 32), min(batch, 8), 2
    values: dict[str, Value] = {
        "method": "fedavg",
        "network.name": name,
        "network.width": width,
        "train.batch-size": batch,
        "train.local-steps": steps,
        "train.learning-rate": 1e-4,
    }
    of_vit = dict(_OF_VIT.get(name, {}))
    if of_vit and given.small:
        of_vit |= _SMALL_VIT
    settings = build(CommonSettings, values | of_vit)
    fused = replace(settings, fused_optimiser=True)
    compute = choose_compute(given.device, precision, 1, *mode)
    torch.manual_seed(0)
    count = min(_IMAGES, 16 * batch)
    images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8)
    split = Split(images, torch.arange(count) % _CLASSES)
    network = compute.place(build_classifier(settings, NetworkShape(shape, _CLASSES)))
    works = {
        "bare": bare(network, split, compute, batch, steps),
        "ours": lambda: LocalTraining(network, split, settings, compute, (1, "site")).run(),
        "fused": lambda: LocalTraining(network, split, fused, compute, (1, "site")).run(),
    }
    found: dict[str, list[float]] = {kind: [] for kind in works}
    for turn in range(given.turns + 1):
        for kind, work in works.items():
            seconds = seconds_of(work)
            found[kind] += [seconds] if turn else []  # the first sets things up
    least = {kind: 1000 * min(seconds) / steps for kind, seconds in found.items()}
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        "network": name,
        "width": width,
        "image": "x".join(map(str, shape)),
        "batch": batch,
        "precision": precision,
        "deterministic": mode[0],
        "memory format": mode[1],
        **{f"{kind} ms": round(milliseconds, 3) for kind, milliseconds in least.items()},
        "ours/bare": round(least["ours"] / least["bare"], 2),
        "images/s": round(1000 * batch / least["ours"]),
        "peak MiB": round(peak / 2**20),
    }


def main() -> None:
    """Measure each job in fp32 and bf16, and print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--modes", action="store_true")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    jobs, modes = JOBS, MODES[:1]
    if given.modes:
        jobs, modes = (_PAPERS_SIZE,), MODES
    rows = []
    for job, mode, precision in itertools.product(jobs, modes, ("fp32", "bf16")):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        rows.append(row(job, precision, mode, given))
        print(*rows[-1].values(), flush=True)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{name}, PyTorch {torch.__version__}")
    if given.csv:
        write_atomically(given.csv, pd.DataFrame(rows).to_csv(index=False))


if __name__ == "__main__":
    main()
