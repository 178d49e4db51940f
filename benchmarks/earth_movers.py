"""What the earth mover's closeness costs: each solver alone, and within a distillation step.

    python benchmarks/earth_movers.py [--repeats 20]

Tokens are random with many channels at 0, as after a ReLU. The distillation step is FedEFM's with
one expert: the student's pass forward and back, the expert's forward, and the closeness.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.maths.earth_movers import closeness
from fedsilo.models.methods.fedefm import FedEFMSettings, batch_closeness, multishot_loss
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape

BATCH = 64


def maps(tokens: int, batch: int = BATCH, channels: int = 64) -> tuple[Tensor, Tensor]:
    """Return the tokens (batch, tokens, channels) of a student and of a teacher near to it."""
    rng = torch.Generator().manual_seed(0)
    u = torch.randn(batch, tokens, channels, generator=rng)
    return u.relu(), (u + 0.5 * torch.randn(u.shape, generator=rng)).relu()


def seconds(job: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of ``job``, after one run that is not counted."""
    job()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        job()
        taken.append(time.perf_counter() - began)
    return float(torch.tensor(taken).median())


def solve(solver: str, tokens: int, batch: int, gradients: bool) -> Callable[[], object]:
    """Return the solving of a batch, with gradients of the student's tokens or without."""
    u, v = maps(tokens, batch)

    def job() -> None:
        student = u.double().requires_grad_() if gradients else u
        value = closeness(student, v.to(student.dtype), solver, differentiable=gradients)
        if gradients:
            value.sum().backward()

    return job


def solvers_table(repeats: int) -> Table:
    """Time each solver; cvxpylayers on eight images, since it takes each alone."""
    table = Table("solver", "tokens", "images", "gradients", "ms in all", "ms an image")
    cases = [
        *(("pot", tokens, BATCH, False) for tokens in (25, 49, 196)),
        *(("pot", tokens, BATCH, True) for tokens in (25, 49)),
        ("cvxpylayers", 25, 8, True),
    ]
    each: dict[tuple[str, int, bool], float] = {}
    for solver, tokens, batch, gradients in cases:
        taken = 1e3 * seconds(solve(solver, tokens, batch, gradients), repeats)
        each[solver, tokens, gradients] = taken / batch
        with_gradients = "yes" if gradients else "no"
        shown = (
            solver,
            str(tokens),
            str(batch),
            with_gradients,
            f"{taken:.1f}",
            f"{taken / batch:.3f}",
        )
        table.add_row(*shown)
    ratio = each["cvxpylayers", 25, True] / each["pot", 25, True]
    table.caption = f"at 25 tokens with gradients pot is {ratio:.0f} times as fast as cvxpylayers"
    return table


def share_in_step(settings: CommonSettings, side: int, repeats: int) -> tuple[float, float]:
    """Return a distillation step's milliseconds and the closeness's share of it."""
    method_settings = FedEFMSettings()
    task = NetworkShape((1, side, side), 10)
    student, expert = (
        build_classifier(dataclasses.replace(settings, seed=seed), task) for seed in (0, 1)
    )
    expert.eval().requires_grad_(False)
    rng = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 1, side, side, generator=rng)
    labels = torch.randint(10, (BATCH,), generator=rng)
    with torch.no_grad():
        feature_maps = [network.encode_with_map(images)[1] for network in (student, expert)]

    def step() -> None:
        student.zero_grad()
        multishot_loss(student, {"host": expert}, images, labels, method_settings)[0].backward()

    step_seconds = seconds(step, repeats)
    part = seconds(
        lambda: batch_closeness(feature_maps[0], feature_maps[1], method_settings), repeats
    )
    return 1e3 * step_seconds, part / step_seconds


def steps_table(repeats: int) -> Table:
    """Time distillation steps whose feature maps have 7x7 tokens."""
    vit = CommonSettings(
        network="vit",
        backbone="vit_tiny_patch16_224",
        backbone_weights="random",
        train_backbone=True,
        prompt_sets="none",
    )
    cases = [
        ("conv, width 16, 56x56", CommonSettings(network="conv"), 56),
        ("conv, width 64, 56x56", CommonSettings(network="conv", width=64), 56),
        ("vit_tiny, 112x112", vit, 112),
    ]
    table = Table("network", "ms a step", "closeness's share")
    for name, settings, side in cases:
        taken, share = share_in_step(settings, side, max(repeats // 4, 3))
        table.add_row(name, f"{taken:.0f}", f"{share:.1%}")
    return table


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    console = Console()
    console.print(f"{torch.get_num_threads()} threads, batches of {BATCH} images")
    console.print(solvers_table(repeats), steps_table(repeats))


if __name__ == "__main__":
    main()
