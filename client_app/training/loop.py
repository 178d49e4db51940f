"""Local training: an optimiser over shuffled batches, the same for every method compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from client_app.training.compute import Compute
from datasets.silo.silos import Split
from models.contract.errors import SiteError
from models.contract.seeding import derive_seed, seeded
from models.contract.settings import CommonSettings
from models.networks.encoders import float_inputs
from models.networks.site_network import SiteNetwork

Penalty = Callable[[], Tensor]
Objective = Callable[[Tensor, Tensor], Tensor]


def batches(count: int, size: int, order: torch.Generator) -> list[Tensor]:
    """Return a shuffled epoch as index tensors; a last batch of one joins the one before it.

    Batch norm has no variance over a single 1x1 map, hence the joining.
    """
    parts = list(torch.split(torch.randperm(count, generator=order), size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def schedule(
    count: int, settings: CommonSettings, order: torch.Generator
) -> Iterator[list[Tensor]]:
    """Yield local training as shuffled passes over ``count`` samples, each a list of batches.

    With ``local-steps`` there are as many batches at every site, whatever it holds; the last pass
    is then cut short.
    """
    if not settings.local_steps:
        for _ in range(settings.local_epochs):
            yield batches(count, settings.batch_size, order)
        return
    left = settings.local_steps
    while left:
        chosen = batches(count, settings.batch_size, order)[:left]
        left -= len(chosen)
        yield chosen


def passes_of(count: int, settings: CommonSettings) -> int:
    """Return how many passes over ``count`` samples, the last perhaps cut short, a round has."""
    if not settings.local_steps:
        return settings.local_epochs
    order = torch.Generator().manual_seed(0)
    return -(-settings.local_steps // len(batches(count, settings.batch_size, order)))


def open_optimiser(module: nn.Module, settings: CommonSettings) -> torch.optim.Optimizer:
    """Return a fresh optimiser of what ``module`` trains.

    A module with ``slow_parameters`` trains those at ``basic-learning-rate``.
    """
    slow: set[nn.Parameter] = set(getattr(module, "slow_parameters", list)())
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [p for p in trained if p not in slow]}]
    if slow:
        rate = settings.basic_learning_rate
        groups.append({"params": [p for p in trained if p in slow], "lr": rate})
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
    }
    kind = kinds[settings.optimiser]
    return kind(groups, lr=settings.learning_rate, weight_decay=settings.weight_decay)


def micro_batches(count: int, size: int) -> list[slice]:
    """Return a batch of ``count`` in parts of ``size`` (0: all at once), none of one sample."""
    if not size or size >= count:
        return [slice(0, count)]
    starts = list(range(0, count, size))
    if count - starts[-1] == 1:
        starts.pop()
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], count], strict=True)]


def add_gradients(
    objective: Objective,
    inputs: Tensor,
    labels: Tensor,
    settings: CommonSettings,
    compute: Compute,
    penalty: Penalty | None = None,
) -> Tensor:
    """Add the gradients of a batch's mean loss and ``penalty``, and return it, detached.

    With ``micro-batch`` they are added up part by part, each weighed by its samples; batch norm
    then sees each part alone.
    """
    total = torch.zeros((), device=inputs.device)
    for part in micro_batches(len(labels), settings.micro_batch):
        with compute.autocast():
            loss = objective(float_inputs(inputs[part]), labels[part])
        share = (part.stop - part.start) / len(labels)
        loss = loss * share if share < 1 else loss
        if penalty and part.start == 0:
            loss = loss + penalty()
        loss.backward()
        total += loss.detach()
    return total


def decayed_rates(
    optimiser: torch.optim.Optimizer, settings: CommonSettings, before: int
) -> Callable[[], None]:
    """Return what sets the learning rate of the next step: divided by the root of its number.

    ``before`` is how many steps the site has taken in earlier rounds. Without 'rate-decay' the
    rates stay as they are.
    """
    if settings.rate_decay == "none":
        return lambda: None
    steps = itertools.count(before + 1)
    usual = [float(group["lr"]) for group in optimiser.param_groups]

    def set_rates() -> None:
        root = math.sqrt(next(steps))
        for group, rate in zip(optimiser.param_groups, usual, strict=True):
            group["lr"] = rate / root

    return set_rates


def steps_of(count: int, settings: CommonSettings) -> int:
    """Return how many optimiser steps a round takes over ``count`` samples."""
    order = torch.Generator().manual_seed(0)
    return sum(map(len, schedule(count, settings, order)))


def train_locally(
    network: SiteNetwork,
    split: Split,
    settings: CommonSettings,
    compute: Compute,
    key: tuple[int | str, ...],
    penalty: Penalty | None = None,
    *,
    objective: Objective | None = None,
    optimiser: torch.optim.Optimizer | None = None,
    pass_begins: Callable[[int], None] = lambda number: None,
    plan: Iterable[list[Tensor]] | None = None,
    after_step: Callable[[Tensor], None] | None = None,
    steps_before: int = 0,
) -> float:
    """Train ``network`` in place and return its mean loss over the last pass.

    Args:
        network: placed on the compute device.
        split: training inputs and labels.
        settings: how long, in which batches, by which optimiser, and the seed.
        compute: device and precision.
        key: round and site; every random number of the training is keyed on it.
        penalty: is added to each batch's loss.
        objective: the loss of a batch's inputs and labels; None: the network's own.
        optimiser: goes on where it was; None: a fresh one.
        pass_begins: is told of each pass before it begins, from 0.
        plan: the passes, each a list of batches of sample numbers; None: those of ``schedule``.
        after_step: is given each batch's inputs after its step.
        steps_before: steps that the site has taken before, for 'rate-decay'.

    Raises:
        SiteError: the loss is not finite.
    """
    module = cast(nn.Module, network)
    module.train()
    optimiser = optimiser or open_optimiser(module, settings)
    objective = objective or network.loss
    inputs, labels = compute.hold(split.inputs), compute.bring(split.labels)
    order = torch.Generator().manual_seed(derive_seed(settings.seed, "batches", *key))
    total = torch.zeros((), device=compute.device)
    set_rates = decayed_rates(optimiser, settings, steps_before)
    with seeded(settings.seed, "training", *key, device=compute.device):
        passes = schedule(len(split), settings, order) if plan is None else plan
        for number, chosen_batches in enumerate(passes):
            pass_begins(number)
            total.zero_()
            for indices in chosen_batches:
                batch, truth = compute.pick(inputs, indices), labels[compute.bring(indices)]
                set_rates()
                optimiser.zero_grad(set_to_none=True)
                loss = add_gradients(objective, batch, truth, settings, compute, penalty)
                optimiser.step()
                if after_step:
                    after_step(batch)
                total += loss * len(indices)
    mean = total.item() / sum(map(len, chosen_batches))
    if not torch.isfinite(total):
        raise SiteError(f"training diverged, its loss is {mean}: lower 'learning-rate'")
    return mean
