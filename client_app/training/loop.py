"""Local training: an optimiser over shuffled batches, the same for every method compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.crowd import Crowd
from fedsilo.client_app.training.eager_optimisers import eager
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.errors import RefusedError, SiteError
from fedsilo.models.contract.messages import TRAINED, measurement
from fedsilo.models.contract.seeding import derive_seed, seeded
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.site_network import SiteNetwork

Penalty = Callable[[], Tensor]
Objective = Callable[[Tensor, Tensor], Tensor]


def batches(count: int, size: int, rng: torch.Generator, smallest: int = 1) -> list[Tensor]:
    """Return a shuffled epoch as index tensors; a last batch of one joins the one before it.

    Batch norm has no variance over a single 1x1 map, hence the joining. So does a last batch of
    fewer than ``smallest``, behind which too few patients would stand.
    """
    parts = list(torch.split(torch.randperm(count, generator=rng), size))
    if len(parts) > 1 and len(parts[-1]) < max(smallest, 2):
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def schedule(
    count: int, settings: CommonSettings, rng: torch.Generator, smallest: int = 1
) -> Iterator[list[Tensor]]:
    """Yield local training as shuffled passes over ``count`` samples, each a list of batches.

    None has fewer than ``smallest`` samples, where there are as many. With ``local-steps`` there
    are as many batches at every site, whatever it holds; the last pass is then cut short.
    """
    if not settings.local_steps:
        for _ in range(settings.local_epochs):
            yield batches(count, settings.batch_size, rng, smallest)
        return
    remaining = settings.local_steps
    while remaining:
        chosen = batches(count, settings.batch_size, rng, smallest)[:remaining]
        remaining -= len(chosen)
        yield chosen


def passes_of(count: int, settings: CommonSettings, smallest: int = 1) -> int:
    """Return how many passes over ``count`` samples, the last perhaps cut short, a round has."""
    if not settings.local_steps:
        return settings.local_epochs
    rng = torch.Generator().manual_seed(0)
    return -(-settings.local_steps // len(batches(count, settings.batch_size, rng, smallest)))


def open_optimiser(module: nn.Module, settings: CommonSettings) -> Optimizer:
    """Return a fresh optimiser of what ``module`` trains.

    A module with ``slow_parameters`` trains those at ``basic-learning-rate``; one with
    ``apart_parameters`` has those trained by its method itself.
    """
    slow: set[nn.Parameter] = set(getattr(module, "slow_parameters", list)())
    apart: set[nn.Parameter] = set(getattr(module, "apart_parameters", list)())
    trained = [p for p in module.parameters() if p.requires_grad and p not in apart]
    groups: list[dict[str, Any]] = [{"params": [p for p in trained if p not in slow]}]
    if slow:
        rate = settings.basic_learning_rate
        groups.append({"params": [p for p in trained if p in slow], "lr": rate})
    kinds: dict[str, Callable[..., Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
    }
    kind = eager(kinds[settings.optimiser])
    decay, fused = settings.weight_decay, settings.fused_optimiser or None
    return kind(groups, lr=settings.learning_rate, weight_decay=decay, fused=fused)


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
    optimiser: Optimizer, settings: CommonSettings, before: int
) -> Callable[[], None]:
    """Return what sets the learning rate of the next step: divided by the root of its number.

    ``before`` is how many steps the site has taken in earlier rounds. Without 'rate-decay' the
    rates stay as they are.
    """
    if settings.rate_decay == "none":
        return lambda: None
    steps = itertools.count(before + 1)
    base_rates = [float(group["lr"]) for group in optimiser.param_groups]

    def set_rates() -> None:
        root = math.sqrt(next(steps))
        for group, rate in zip(optimiser.param_groups, base_rates, strict=True):
            group["lr"] = rate / root

    return set_rates


def steps_of(count: int, settings: CommonSettings, smallest: int = 1) -> int:
    """Return how many optimiser steps a round takes over ``count`` samples."""
    rng = torch.Generator().manual_seed(0)
    return sum(map(len, schedule(count, settings, rng, smallest)))


def _nothing(*_: object) -> None:
    """Do nothing, where a training has nothing to be told of."""


@dataclass(frozen=True)
class LocalTraining:
    """What one training of one network at a site takes; ``train_locally`` carries it out.

    ``pass_begins`` and ``steps_before`` count by ``split`` and ``settings``: who changes how many
    steps there are gives them too.

    Attributes:
        network: placed on the compute device; it is trained in place.
        split: training inputs and labels.
        settings: how long, in which batches, by which optimiser, and the seed.
        compute: device and precision.
        key: round and site; every random number of the training is keyed on it.
        objective: the loss of a batch's inputs and labels; None: the network's own.
        penalty: is added to each batch's loss.
        optimiser: goes on where it was; None: a fresh one.
        plan: the passes, each a list of batches of sample numbers; None: those of ``schedule``.
        epoch_order: returns the order (n,) of an epoch's samples, where epochs span rounds; asked
            before an epoch begins, the network being as it came. None: any order.
        pass_begins: is told of each pass before it begins, from 0.
        after_step: is given each batch's inputs, and the optimiser, after its step.
        ended: is told once the last step is taken.
        steps_before: steps that the site has taken before, for 'rate-decay'.
        only_measured: nothing is trained; the loss on ``split`` of the network as it is will do.
        minimum_batch: samples that must stand behind each step, and behind a unit's change.
        minimum_steps: steps that must stand behind what is trained.
        shares: is told of what samples add to a unit's change, see ``Crowd``.
        metrics: what the training itself measures while it runs, by MetricRecord key.
    """

    network: SiteNetwork
    split: Split
    settings: CommonSettings
    compute: Compute
    key: tuple[int | str, ...]
    objective: Objective | None = None
    penalty: Penalty | None = None
    optimiser: Optimizer | None = None
    plan: Iterable[list[Tensor]] | None = None
    epoch_order: Callable[[int], Tensor] | None = None
    pass_begins: Callable[[int], None] = _nothing
    after_step: Callable[[Tensor, Optimizer], None] = _nothing
    ended: Callable[[], None] = _nothing
    steps_before: int = 0
    only_measured: bool = False
    minimum_batch: int = 1
    minimum_steps: int = 1
    shares: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> Objective:
        """The loss of a batch: ``objective``, else the network's own."""
        return self.objective or self.network.loss


def train_locally(training: LocalTraining) -> float:
    """Train a network in place and return its mean loss over the last pass.

    Raises:
        SiteError: the loss is not finite.
        RefusedError: fewer samples or steps stand behind it than the hospital allows.
    """
    crowd = Crowd(training.network, training.minimum_batch, training.shares)
    with crowd.watching():
        loss = _train(training, crowd)
    if training.minimum_batch > 1:
        training.metrics[measurement(TRAINED, "train", "put-back")] = crowd.put_back
    return loss


def _train(training: LocalTraining, crowd: Crowd) -> float:
    settings, compute, split = training.settings, training.compute, training.split
    module = training.network
    module.train()
    optimiser = training.optimiser or open_optimiser(module, settings)
    inputs, labels = compute.hold(split.inputs), compute.bring(split.labels)
    total, steps = torch.zeros((), device=compute.device), 0
    set_rates = decayed_rates(optimiser, settings, training.steps_before)
    with seeded(settings.seed, "training", *training.key, device=compute.device):
        for number, chosen_batches in enumerate(_passes(training)):
            training.pass_begins(number)
            total.zero_()
            crowd.next_pass()
            for indices in chosen_batches:
                _refuse_few_samples(indices, training.minimum_batch)
                batch, truth = inputs.pick(indices), labels[compute.bring(indices)]
                set_rates()
                optimiser.zero_grad(set_to_none=True)
                loss = add_gradients(
                    training.loss, batch, truth, settings, compute, training.penalty
                )
                crowd.add_step()
                optimiser.step()
                training.after_step(batch, optimiser)
                total += loss * len(indices)
            steps += len(chosen_batches)
    mean = total.item() / sum(map(len, chosen_batches))
    if not torch.isfinite(total):
        raise SiteError(f"training diverged, its loss is {mean}: lower 'learning-rate'")
    _refuse_few_steps(steps, training.minimum_steps)
    training.ended()
    return mean


def _passes(training: LocalTraining) -> Iterable[list[Tensor]]:
    if training.plan is not None:
        return training.plan
    settings = training.settings
    rng = torch.Generator().manual_seed(derive_seed(settings.seed, "batches", *training.key))
    return schedule(len(training.split), settings, rng, training.minimum_batch)


def _refuse_few_samples(indices: Tensor, minimum: int) -> None:
    """Refuse a step behind which too few different samples stand."""
    if minimum > 1 and (there := len(set(indices.tolist()))) < minimum:
        raise RefusedError(
            f"{there} samples would stand behind an optimiser step, and at least {minimum} must "
            "('minimum-batch'): ask for larger batches, or leave the site out"
        )


def _refuse_few_steps(steps: int, minimum: int) -> None:
    if steps < minimum:
        raise RefusedError(
            f"{steps} optimiser step(s) would stand behind what leaves, and at least {minimum} "
            "must ('minimum-steps-per-reply'): raise 'local-epochs' or 'local-steps', or leave the "
            "site out"
        )
