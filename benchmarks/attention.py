"""What distillation by attention maps costs: the closed form, and a training step of a ViT.

    python benchmarks/attention.py distance                    # closed form against upsampling
    python benchmarks/attention.py steps [--batches 4 16 32]   # seconds and memory of a step
    python benchmarks/attention.py throughput --csv FILE       # images per second, on a GPU bf16
    python benchmarks/attention.py influence RUN-DIR [RUN-DIR] # norms of both gradients

``distance``: eq. 7 for a batch of maps against the buffer of five other sites (M = 5), once by
U^T U and the buffer's moments, once by upsampling every map to 224x224. ``steps``: a whole training
step of ViT-S/16 with prompts at 224x224 on the phantom, each in a process of its own, whose peak
memory it is: without rollout, with it, and with distillation.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedsilo.client_app.training.compute import Compute, choose_compute
from fedsilo.core.files.locations import find_places
from fedsilo.core.files.state_files import load_state
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import build
from fedsilo.datasets.synthetic.phantoms import DERMOSCOPY_PHANTOM
from fedsilo.models.maths.attention_rollout import (
    BufferMoments,
    buffer_moments,
    distillation_loss,
    scaled_maps,
    upsampling_gram,
)
from fedsilo.models.methods.fedevprompt import BUFFER
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.prompted_vit import PromptedViT
from fedsilo.models.networks.site_network import evidences
from fedsilo.runs.finished_run import FinishedRun

_GRID, _IMAGE, _SITES, _PER_SITE = (14, 14), (224, 224), 5, 5
_VALUES = {
    "method": "fedevprompt",
    "dataset": "dermoscopy-phantom",
    "network.name": "vit",
    "vit.backbone-weights": "random",  # time and memory do not depend on the values
    "split.sample-share": 0.02,
}
_KINDS = ("plain", "rollout", "distillation")


def random_maps(count: int, seed: int) -> Tensor:
    """Return maps (count, cells) that sum to 1."""
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(count, _GRID[0] * _GRID[1], generator=rng).softmax(dim=1)


def by_upsampling(maps: Tensor, buffer: Tensor, per_site: int) -> Tensor:
    """Return the batch mean of eq. 7 as the paper writes it: every map at image resolution."""

    def upsampled(cells: Tensor) -> Tensor:
        images = cells.reshape(-1, 1, *_GRID)
        return torch.nn.functional.interpolate(images, size=_IMAGE, mode="bilinear").flatten(1)

    own, others = upsampled(maps), upsampled(buffer)
    return (own[:, None] - others[None]).square().sum(dim=(1, 2)).mean() / per_site


def seconds_of(work: Callable[[], object], repeats: int = 20) -> float:
    """Return the least seconds of ``work``, which is run once before."""
    work()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def distance(console: Console, batch: int = 32) -> None:
    """Compare value, gradient and time of both forms."""
    torch.set_num_threads(1)
    buffer = random_maps(_SITES * _PER_SITE, 1)
    labels = torch.zeros(batch, dtype=torch.int64)
    gram = upsampling_gram(_GRID, _IMAGE)
    moments = buffer_moments({0: buffer}, 1, gram).to(torch.device("cpu"))
    maps = random_maps(batch, 0).requires_grad_()

    def closed() -> Tensor:
        (grad,) = torch.autograd.grad(distillation_loss(maps, labels, moments, _PER_SITE), maps)
        return grad

    def written_out() -> Tensor:
        (grad,) = torch.autograd.grad(by_upsampling(maps, buffer, _PER_SITE), maps)
        return grad

    values = [
        distillation_loss(maps, labels, moments, _PER_SITE).item(),
        by_upsampling(maps.double(), buffer.double(), _PER_SITE).item(),
    ]
    grads = (closed() - written_out()).norm() / written_out().norm()
    fast, slow = seconds_of(closed), seconds_of(written_out, 5)
    console.print(
        f"batch {batch}, buffer {len(buffer)} maps, value and gradient, one thread: closed form "
        f"{1e3 * fast:.3f} ms, upsampled {1e3 * slow:.1f} ms, {slow / fast:.0f} times; value "
        f"differs by {abs(values[0] / values[1] - 1):.1e}, gradient by {grads.item():.1e}",
        highlight=False,
        soft_wrap=True,
    )


def training_step(
    settings: CommonSettings, batch: int, kind: str
) -> tuple[Callable[[], None], Compute]:
    """Return a training step on images of the phantom, as a site makes it."""
    compute = choose_compute(settings.device, settings.precision, settings.threads)
    silo = DERMOSCOPY_PHANTOM.load("vidir_molemax", settings, find_places("", ""))
    images = silo.train.inputs[torch.arange(batch) % len(silo.train)]
    labels = silo.train.labels[torch.arange(batch) % len(silo.train)]
    task = NetworkShape(tuple(images.shape[1:]), silo.shape.outputs)
    network = build_classifier(settings, task)
    compute.place(network)
    network.train()
    assert isinstance(network, PromptedViT)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained)
    moments = _moments(network, compute, task.outputs)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        inputs, targets = float_inputs(compute.bring(images)), compute.bring(labels)
        with compute.autocast():
            if kind == "plain":
                loss = network.loss(inputs, targets)
            else:
                tokens, maps = network.encode_with_rollout(inputs)
                loss = network.criterion(network.classify(tokens), targets)
                if kind == "distillation":
                    loss = loss + 1e-6 * distillation_loss(maps, targets, moments, _PER_SITE)
        loss.backward()
        optimiser.step()

    return step, compute


def _moments(network: PromptedViT, compute: Compute, classes: int) -> BufferMoments:
    gram = upsampling_gram(network.grid_size(), network.image_size())
    cells = len(gram)
    maps = {c: torch.full((_SITES * _PER_SITE, cells), 1 / cells) for c in range(classes)}
    return buffer_moments(maps, classes, gram).to(compute.device)


def one_step(batch: int, kind: str, threads: int) -> None:
    """Print seconds and peak memory of a step; for a process of its own."""
    settings = build(CommonSettings, {**_VALUES, "machine.threads": threads})
    step, compute = training_step(settings, batch, kind)
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = seconds_of(step, 3)
    peak = max(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    if compute.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    print(f"{seconds} {peak}")


def steps(console: Console, batches: list[int], threads: int) -> None:
    """Print a table of steps, with the cost of distillation over the plain step."""
    table = Table("batch", "step", "seconds", "over plain", "images / s", "peak MiB")
    for batch in batches:
        plain = 0.0
        for kind in _KINDS:
            command = [sys.executable, __file__, "one", str(batch), kind, "--threads", str(threads)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            seconds, peak = map(float, output.split())
            plain = plain or seconds
            over = f"{100 * (seconds / plain - 1):+.1f} %"
            cells = (f"{seconds:.2f}", over, f"{batch / seconds:.1f}", f"{peak:,.0f}")
            table.add_row(str(batch), kind, *cells)
    console.print(table)


def throughput(
    console: Console, csv: Path | None, batches: Sequence[int] = (32, 128), repeats: int = 10
) -> None:
    """Print images per second of training steps, fp32 and bf16, on the device there is.

    The same rows are written to ``csv``, unless it is None.
    """
    rows = []
    for precision in ("fp32", "bf16"):
        for batch in batches:
            for kind in _KINDS:
                settings = build(CommonSettings, {**_VALUES, "machine.precision": precision})
                step, compute = training_step(settings, batch, kind)
                cuda = compute.device.type == "cuda"
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                seconds = seconds_of(step, repeats)
                peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
                rows.append((precision, batch, kind, round(batch / seconds), round(peak)))
    names = ("precision", "batch", "step", "images/s", "peak MiB")
    table = Table(*names)
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)
    if csv:
        pd.DataFrame(rows, columns=names).to_csv(csv, index=False)


def influence(console: Console, run_dirs: Sequence[Path], csv: Path | None) -> None:
    """Print the norms of both gradients per run and site, the maps scaled as the run has them."""
    names = ("run", "site", "evidential loss", "gradient", "distance", "its gradient", "ratio")
    rows = [(run_dir.name, *row) for run_dir in run_dirs for row in _influence(run_dir)]
    table = Table(*names)
    for run, site, *numbers in rows:
        table.add_row(run, site, *(f"{number:.3g}" for number in numbers))
    console.print(table)
    if csv:
        pd.DataFrame(rows, columns=names).to_csv(csv, index=False, float_format="%.4g")


def _influence(run_dir: Path) -> Iterator[tuple[str, float, float, float, float, float]]:
    """Yield each site's name, loss and norm, distance and norm, and the norms' ratio."""
    sites = json.loads((run_dir / "silos.json").read_text())
    buffer, _ = load_state(run_dir / "model.safetensors")
    for site in sites:
        method = FinishedRun.open(run_dir).lab(site)
        network, scale = method.open(), method.session.method.settings.map_scale
        assert isinstance(network, PromptedViT)
        network.train()
        for evidence in evidences(network):  # as at the end of training, when annealing is over
            evidence.kl_weight = 1.0
        others: dict[int, list[Tensor]] = {}
        for name, maps in buffer.items():
            if name.startswith(BUFFER) and not name.startswith(f"{BUFFER}{site}/"):
                scaled = scaled_maps(torch.from_numpy(maps), scale)
                others.setdefault(int(name.rpartition("/")[2]), []).append(scaled)
        gram = upsampling_gram(network.grid_size(), network.image_size())
        joined = {label: torch.cat(parts) for label, parts in others.items()}
        moments = buffer_moments(joined, method.silo.shape.outputs, gram)
        train, prompts = method.silo.train, list(network.prompts.values())
        tokens, maps = network.encode_with_rollout(float_inputs(train.inputs[:256]))
        labels = train.labels[:256]
        task = network.criterion(network.classify(tokens), labels)
        scaled = scaled_maps(maps, scale)
        distillation = distillation_loss(scaled, labels, moments.to(maps.device), _PER_SITE)
        norms = [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, prompts, retain_graph=True)])
            .norm()
            .item()
            for loss in (task, distillation)
        ]
        yield site, task.item(), norms[0], distillation.item(), norms[1], norms[1] / norms[0]


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("distance")
    table = commands.add_parser("steps")
    table.add_argument("--batches", type=int, nargs="+", default=[4, 16, 32])
    table.add_argument("--threads", type=int, default=2)
    fast = commands.add_parser("throughput")
    fast.add_argument("--csv", type=Path)
    runs = commands.add_parser("influence")
    runs.add_argument("run_dirs", type=Path, nargs="+")
    runs.add_argument("--csv", type=Path)
    one = commands.add_parser("one")
    one.add_argument("batch", type=int)
    one.add_argument("kind", choices=_KINDS)
    one.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    console = Console()
    if options.command == "distance":
        distance(console)
    elif options.command == "steps":
        steps(console, options.batches, options.threads)
    elif options.command == "throughput":
        throughput(console, options.csv)
    elif options.command == "influence":
        influence(console, options.run_dirs, options.csv)
    else:
        one_step(options.batch, options.kind, options.threads)


if __name__ == "__main__":
    main()
