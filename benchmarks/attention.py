"""What distillation by attention maps costs: the closed form, and a training step of a ViT.

    python benchmarks/attention.py distance                    # closed form against upsampling
    python benchmarks/attention.py steps [--batches 4 16 32]   # seconds and memory of a step
    python benchmarks/attention.py throughput --csv FILE       # images per second, on a GPU bf16
    python benchmarks/attention.py influence RUN-DIR [RUN-DIR] # norms of both gradients

``distance``: eq. 7 for a batch of maps against the buffer of five other sites (M = 5), once by
U^T U and the buffer's moments, once by upsampling every map to 224x224. ``steps``: a whole training
step of ViT-S/16 with prompts at 224x224 on the phantom, each in a process of its own, whose peak
memory it is: without rollout, with it, with distillation, and with distillation whose maps are
computed apart from fused attention. The medians are of ``--turns`` turns of CPU seconds.
``throughput``: the same steps by the clock; the images lie on the device, as in a site's training.
``--device cpu --small`` tries either with tiny images and a ViT of three layers.
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
from fedsilo.core.settings_schema import Value, build
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
_VALUES: dict[str, Value] = {
    "method": "fedevprompt",
    "dataset": "dermoscopy-phantom",
    "network.name": "vit",
    "vit.backbone-weights": "random",  # time and memory do not depend on the values
    "split.sample-share": 0.02,
}
# Tiny images and layers, by which the commands are tried where there is no GPU
_SMALL: dict[str, Value] = {
    "data.image-size": 32,
    "vit.backbone-width": 48,
    "vit.backbone-depth": 3,
    "vit.backbone-heads": 3,
    "vit.prompt-length": 5,
    "vit.basic-layers": 1,
}
_KINDS = ("plain", "rollout", "distillation", "maps apart")


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
    network.fuses_maps = kind == "maps apart"
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained)
    moments = _moments(network, compute, task.outputs)
    pick, label, rows = compute.hold(images), compute.hold(labels), torch.arange(batch)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        inputs, targets = float_inputs(pick(rows)), label(rows)
        with compute.autocast():
            if kind == "plain":
                loss = network.loss(inputs, targets)
            else:
                tokens, maps = network.encode_with_rollout(inputs)
                loss = network.criterion(network.classify(tokens), targets)
                if kind != "rollout":
                    loss = loss + 1e-6 * distillation_loss(maps, targets, moments, _PER_SITE)
        loss.backward()
        optimiser.step()

    return step, compute


def _moments(network: PromptedViT, compute: Compute, classes: int) -> BufferMoments:
    gram = upsampling_gram(network.grid_size(), network.image_size())
    cells = len(gram)
    maps = {c: torch.full((_SITES * _PER_SITE, cells), 1 / cells) for c in range(classes)}
    return buffer_moments(maps, classes, gram).to(compute.device)


def settings_of(given: argparse.Namespace, **more: Value) -> CommonSettings:
    """Return the settings of the command's steps."""
    small = _SMALL if given.small else {}
    machine: dict[str, Value] = {f"machine.{name}": value for name, value in more.items()}
    return build(CommonSettings, {**_VALUES, **small, **machine})


def one_step(given: argparse.Namespace) -> None:
    """Print CPU seconds and peak MiB of a step, for a process of its own."""
    settings = settings_of(given, threads=given.threads, device="cpu")
    step, _ = training_step(settings, given.batch, given.kind)
    step()
    seconds = []
    for _ in range(3):
        began = time.process_time()
        step()
        seconds.append(time.process_time() - began)
    print(min(seconds), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def steps(console: Console, given: argparse.Namespace) -> None:
    """Print a table of steps, with the cost of distillation over the plain step; medians."""
    runs = []
    for _ in range(given.turns):
        for batch in given.batches:
            for kind in _KINDS:
                command = [sys.executable, __file__, "one", str(batch), kind]
                command += ["--threads", str(given.threads), *(["--small"] if given.small else [])]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                runs.append((batch, kind, *map(float, output.split())))
    names = ["batch", "step", "CPU s", "peak MiB"]
    found = pd.DataFrame(runs, columns=names).groupby(names[:2], sort=False).median()
    rows = found.round({"CPU s": 3, "peak MiB": 0}).astype({"peak MiB": int}).reset_index()
    plain = rows[rows["step"] == "plain"].set_index("batch")["CPU s"]
    rows["over plain %"] = (100 * (rows["CPU s"] / rows["batch"].map(plain) - 1)).round(1)
    _show(console, rows, given.csv)


def _show(console: Console, rows: pd.DataFrame, csv: Path | None) -> None:
    """Print the rows, and write them to ``csv`` unless it is None."""
    table = Table(*map(str, rows))
    for row in rows.itertuples(index=False):
        table.add_row(*map(str, row))
    console.print(table)
    if csv:
        rows.to_csv(csv, index=False)


def throughput(console: Console, given: argparse.Namespace) -> None:
    """Print images per second of training steps, fp32 and bf16, on a GPU or by ``--device``."""
    rows = []
    for precision in ("fp32", "bf16"):
        settings = settings_of(given, precision=precision, device=given.device)
        for batch in given.batches:
            for kind in _KINDS:
                step, compute = training_step(settings, batch, kind)
                cuda = compute.device.type == "cuda"
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                seconds = seconds_of(step, given.repeats)
                peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
                rows.append((precision, batch, kind, round(batch / seconds), round(peak)))
    names = ("precision", "batch", "step", "images/s", "peak MiB")
    _show(console, pd.DataFrame(rows, columns=names), given.csv)


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
    table.add_argument("--turns", type=int, default=1)
    fast = commands.add_parser("throughput")
    fast.add_argument("--batches", type=int, nargs="+", default=[32, 128])
    fast.add_argument("--repeats", type=int, default=10)
    fast.add_argument("--device", default="auto")
    runs = commands.add_parser("influence")
    runs.add_argument("run_dirs", type=Path, nargs="+")
    one = commands.add_parser("one")
    one.add_argument("batch", type=int)
    one.add_argument("kind", choices=_KINDS)
    for command in (table, fast, runs):
        command.add_argument("--csv", type=Path)
    for command in (table, fast, one):
        command.add_argument("--small", action="store_true")
    for command in (table, one):
        command.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    console = Console()
    if options.command == "distance":
        distance(console)
    elif options.command == "steps":
        steps(console, options)
    elif options.command == "throughput":
        throughput(console, options)
    elif options.command == "influence":
        influence(console, options.run_dirs, options.csv)
    else:
        one_step(options)


if __name__ == "__main__":
    main()
