"""Local training: an optimiser over shuffled batches, the same for every method compared."""

import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.private import PrivateTraining
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.errors import RefusedError, SiteError
from fedsilo.models.contract.messages import SAMPLES, STEPS
from fedsilo.models.contract.seeding import derive_seed, seeded
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.maths.dirichlet import annealing, evidences
from fedsilo.models.maths.pacing import epoch_of
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.site_network import SiteNetwork

_GUARDED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")

Penalty = Callable[[], Tensor]
AfterStep = Callable[[Tensor, Optimizer], None]
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


@cache
def eager(kind: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Return an optimiser class that computes what ``kind`` does, and is never compiled.

    PyTorch guards methods of its optimisers against ``torch.compile``, and the guards import
    ``torch._dynamo`` at the first call: more than a second in every process. Each guard names the
    method that it wraps, so a subclass can have the methods without it.
    """
    base = cast(type[Optimizer], kind)
    methods = {name: inspect.unwrap(getattr(base, name)) for name in _GUARDED}
    methods["step"] = torch.no_grad()(inspect.unwrap(base.step))
    return type(base.__name__, (base,), methods)


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
    whole = [slice(0, len(labels))]
    for part in micro_batches(len(labels), settings.micro_batch) if settings.micro_batch else whole:
        with compute.autocast():
            loss = objective(float_inputs(inputs[part]), labels[part])
        share = (part.stop - part.start) / len(labels)
        loss = loss * share if share < 1 else loss
        if penalty and part.start == 0:
            loss = loss + penalty()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
        total += loss.detach()
    return total


def decayed_rates(
    optimiser: Optimizer, settings: CommonSettings, before: int
) -> Callable[[], None]:
    """Return a function that sets the learning rate of the next step: divided by its number's root.

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


def train_locally(
    network: SiteNetwork,
    split: Split,
    settings: CommonSettings,
    compute: Compute,
    key: tuple[int | str, ...],
    *,
    objective: Objective | None = None,
    penalty: Penalty | None = None,
    optimiser: Optimizer | None = None,
    plan: Iterable[list[Tensor]] | None = None,
    before_pass: Callable[[int], None] | None = None,
    after_step: AfterStep | None = None,
    steps_before: int = 0,
    minimum_steps: int = 1,
    minimum_batch: int = 1,
    private: PrivateTraining | None = None,
    work: Counter[str] | None = None,
) -> float:
    """Train a network in place and return its mean loss over the last pass.

    Args:
        network: placed on the compute device.
        split: training inputs and labels.
        settings: how long, in which batches, by which optimiser, and the seed.
        compute: device and precision.
        key: every random number of the training is keyed on it, such as (round, site).
        objective: the loss of a batch's inputs and labels, or None for the network's own.
        penalty: a term that is added to each batch's loss.
        optimiser: continues from its state, or None for a new one.
        plan: the passes, each a list of batches of sample numbers, or None for ``schedule``.
        before_pass: called with the number of each pass, from 0.
        after_step: called with each batch's inputs and the optimiser after its step.
        steps_before: steps that the site has taken before, for 'rate-decay'.
        minimum_steps: steps that must be taken; 0: whatever comes of them is kept.
        minimum_batch: different samples that must be behind each step.
        private: draws the batches and bounds each patient's gradient; None for plain training.
        work: counts the steps and the samples that they saw.

    Raises:
        SiteError: the loss is not finite.
        RefusedError: fewer samples or steps than the hospital allows are behind the training.
    """
    network.train()
    objective = objective or network.loss
    optimiser = optimiser or open_optimiser(network, settings)
    pick, labels = compute.hold(split.inputs), compute.bring(split.labels)
    total, steps, seen = torch.zeros((), device=compute.device), 0, 0
    decays = settings.rate_decay != "none"
    set_rates = decayed_rates(optimiser, settings, steps_before) if decays else None
    if private:
        plan = private.plan(len(split.labels))
    elif plan is None:
        rng = torch.Generator().manual_seed(derive_seed(settings.seed, "batches", *key))
        plan = schedule(len(split.labels), settings, rng, minimum_batch)
    gradients = partial(private.add_gradients, network) if private else add_gradients
    # One block for all draws of the training: dropout's follow one another over the batches
    with seeded(settings.seed, "training", *key, device=compute.device):
        for number, batches_of_pass in enumerate(plan):
            if before_pass:
                before_pass(number)
            if minimum_batch > 1:
                _refuse_small(batches_of_pass, minimum_batch)
            total.zero_()
            for indices in batches_of_pass:
                batch, truth = pick(indices), labels[indices]
                if set_rates:
                    set_rates()
                optimiser.zero_grad(set_to_none=True)
                loss = gradients(objective, batch, truth, settings, compute, penalty)
                optimiser.step()
                if after_step:
                    after_step(batch, optimiser)
                total += loss * len(indices)
            steps, size = steps + len(batches_of_pass), sum(map(len, batches_of_pass))
            seen += size
        mean = total.item() / max(1, size)
        (Counter() if work is None else work).update({STEPS: steps, SAMPLES: seen})
        if minimum_steps:
            _refuse_unusable(mean, steps, minimum_steps)
    return mean


def _refuse_small(batches_of_pass: list[Tensor], minimum: int) -> None:
    smallest = min((len(set(batch.tolist())) for batch in batches_of_pass), default=minimum)
    if smallest < minimum:
        raise RefusedError(
            f"{smallest} samples would be behind an optimiser step, and at least {minimum} must "
            "be ('minimum-batch'): ask for larger batches, or leave the site out"
        )


def _refuse_unusable(loss: float, steps: int, minimum: int) -> None:
    if not math.isfinite(loss):
        raise SiteError(f"training diverged, its loss is {loss}: lower 'learning-rate'")
    if steps < minimum:
        raise RefusedError(
            f"{steps} optimiser step(s) would stand behind what leaves, and at least {minimum} "
            "must ('minimum-steps-per-reply'): raise 'local-epochs' or 'local-steps', or leave the "
            "site out"
        )


def step_beside(optimiser: Optimizer, settings: CommonSettings, before: int) -> AfterStep:
    """Return the step of an optimiser of what is trained beside a network.

    It follows each of the network's and uses the gradients of the same batch.
    """
    set_rates = decayed_rates(optimiser, settings, before)

    def step(inputs: Tensor, _: Optimizer) -> None:
        set_rates()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


def steps_before(rounds: int, count: int, settings: CommonSettings, smallest: int) -> int:
    """Return the steps of so many rounds over ``count`` samples, each as long as this one is."""
    return rounds * (settings.pace if settings.epoch_steps else steps_of(count, settings, smallest))


def annealed(
    network: SiteNetwork, rounds: int, count: int, settings: CommonSettings, smallest: int
) -> Callable[[int], None]:
    """Return what weighs evidential learning's KL term by the epochs of all rounds so far."""
    if settings.epoch_steps:
        before = epoch_of(rounds + 1, settings)
    else:
        before = rounds * passes_of(count, settings, smallest)

    def anneal(number: int) -> None:
        for evidence in evidences(network):
            evidence.kl_weight = annealing(before + number)

    return anneal
