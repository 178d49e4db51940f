"""Local training: an optimiser over shuffled batches, the same for every method compared."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from fedsilo.client_app.training.augmentation import augmenter
from fedsilo.client_app.training.compute import Compute, scaled_step
from fedsilo.client_app.training.initial_network import refuse_small
from fedsilo.client_app.training.optimisers import SMALLEST_PART, open_optimiser
from fedsilo.client_app.training.private import PrivateTraining
from fedsilo.client_app.training.rates import is_scheduled, rate_setter
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.errors import RefusedError, SiteError
from fedsilo.models.contract.messages import SAMPLES, STEPS
from fedsilo.models.contract.seeding import derive_seed, seeded
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.maths.dirichlet import annealing, evidences
from fedsilo.models.maths.pacing import epoch_of
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.site_network import SiteNetwork

Penalty = Callable[[], Tensor]
AfterStep = Callable[[Tensor, Optimizer], None]
Objective = Callable[[Tensor, Tensor], Tensor]


def batches(count: int, size: int, rng: torch.Generator, smallest: int = 1) -> list[Tensor]:
    """Return a shuffled epoch as index tensors; a last batch of one joins the one before it.

    Batch norm has no variance over a single 1x1 map, hence the joining. A last batch of fewer than
    ``smallest`` is joined too, since it would have too few patients.
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
    return sum(1 for _ in schedule(count, settings, torch.Generator().manual_seed(0), smallest))


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
    scaler: GradScaler | None = None,
) -> Tensor:
    """Add the gradients of a batch's mean loss and ``penalty``, and return it, detached.

    With ``micro-batch`` they are added up part by part, each weighted by its samples; batch norm
    then sees each part alone. With ``scaler`` the gradients are of the scaled loss.
    """
    total = torch.zeros((), device=inputs.device)
    one = [slice(0, len(labels))]
    for part in micro_batches(len(labels), settings.micro_batch) if settings.micro_batch else one:
        with compute.autocast():
            loss = objective(float_inputs(inputs[part]), labels[part])
        share = (part.stop - part.start) / len(labels)
        loss = loss * share if share < 1 else loss
        if penalty and part.start == 0:
            loss = loss + penalty()
        scaled = scaler.scale(loss) if scaler else loss
        scaled.backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
        total += loss.detach()
    return total


def steps_of(count: int, settings: CommonSettings, smallest: int = 1) -> int:
    """Return how many optimiser steps a round takes over ``count`` samples."""
    rng = torch.Generator().manual_seed(0)
    return sum(map(len, schedule(count, settings, rng, smallest)))


@dataclass(frozen=True)
class Options:
    """What a training has in addition to a plain one; ``Lab.fit`` explains the first five."""

    objective: Objective | None = None
    penalty: Penalty | None = None
    after_step: AfterStep | None = None
    beside: Optimizer | None = None
    plan: Iterable[list[Tensor]] | None = None
    optimiser: Optimizer | None = None  # continues from its state, or None for a new one
    before_pass: Callable[[int], None] | None = None  # called with a pass's number, from 0
    counted: tuple[int, int] | None = None  # by ``counted_steps``; None: the rate stays
    minimum_steps: int = 1  # that must be taken, or 0 to keep the result of any
    minimum_batch: int = 1  # different samples that must be behind each step
    weights: Tensor | None = None  # of the samples (n,) in the loss; None: all count the same
    # Draws the batches and bounds each patient's gradient, or None for plain training
    private: PrivateTraining | None = None
    work: Counter[str] = field(default_factory=Counter)  # counts steps, and the samples they saw


def train_locally(
    network: SiteNetwork,
    split: Split,
    settings: CommonSettings,
    compute: Compute,
    key: tuple[int | str, ...],
    options: Options | None = None,
) -> float:
    """Train a network in place and return its mean loss over the last pass.

    Args:
        network: placed on the compute device.
        split: training inputs and labels.
        settings: how long, in which batches, by which optimiser, and the seed.
        compute: device and precision.
        key: every random number of the training is keyed on it, such as (round, site).
        options: what it has in addition, if anything.

    Raises:
        SiteError: the loss is not finite.
        RefusedError: fewer samples or steps than the hospital allows are behind the training.
    """
    network.train()
    options = options or Options()
    plan, count, smallest = options.plan, len(split.labels), options.minimum_batch
    steps = _Steps(network, split, settings, compute, key, options)
    if options.private:
        plan = options.private.plan(count)
    elif plan is None:
        rng = torch.Generator().manual_seed(derive_seed(settings.seed, "batches", *key))
        plan = schedule(count, settings, rng, smallest)
    # One block for all draws of the training: dropout's follow one another over the batches
    with seeded(settings.seed, "training", *key, device=compute.device):
        for number, batches_of_pass in enumerate(plan):
            if options.before_pass:
                options.before_pass(number)
            if smallest > 1:
                refuse_small(batches_of_pass, smallest, options.weights)
            steps.take(batches_of_pass)
        mean = float(steps.losses) / max(1, steps.samples)
        options.work.update({STEPS: len(steps.rates), SAMPLES: steps.seen})
        # Not even a refusal may tell what a real hospital's patients made of a private loss
        judged = 0.0 if options.private and options.private.release.alone else mean
        refuse_unusable(judged, steps.rates, options.minimum_steps, compute.fp16)
    return mean


class _Steps:
    """The optimiser steps of a training, whose arguments are those of ``train_locally``."""

    def __init__(
        self,
        network: SiteNetwork,
        split: Split,
        settings: CommonSettings,
        compute: Compute,
        key: tuple[int | str, ...],
        options: Options,
    ) -> None:
        self.rates: list[float] = []  # the learning rate of each step that was taken
        self.seen = 0  # the samples in all steps
        self.samples = 0  # of the last pass
        self.losses: Tensor | float = 0.0  # the sum over the samples of the last pass
        private = options.private
        self._optimisers = [options.optimiser or open_optimiser(network, settings)]
        self._optimisers += [options.beside] if options.beside else []
        self._scaler = compute.scaler() if compute.fp16 else None
        self._add_gradients = partial(
            partial(private.add_gradients, network) if private else add_gradients,
            options.objective or network.loss,
            settings=settings,
            compute=compute,
            penalty=options.penalty,
            scaler=self._scaler,
        )
        self._pick, self._label = compute.hold(split.inputs), compute.hold(split.labels)
        self._augment = augmenter(settings, key, compute.device) if settings.augmentation else None
        steps = options.counted
        self._set_rates = rate_setter(self._optimisers, settings, *steps) if steps else None
        self._after_step = options.after_step

    def take(self, batches_of_pass: list[Tensor]) -> None:
        """Take the steps of a pass: a batch whose gradients are not finite in fp16 is left out."""
        self.losses, self.samples = 0.0, 0
        for indices in batches_of_pass:
            batch, labels = self._pick(indices), self._label(indices)
            batch = self._augment(batch) if self._augment else batch
            if self._set_rates:
                self._set_rates()
            self._optimisers[0].zero_grad(set_to_none=True)
            loss = self._add_gradients(batch, labels)
            if self._scaler and not scaled_step(self._optimisers, self._scaler):
                continue
            for one in [] if self._scaler else self._optimisers:
                one.step()
            for one in self._optimisers[1:]:
                one.zero_grad(set_to_none=True)
            if self._after_step:
                self._after_step(batch, self._optimisers[0])
            self.rates.append(self._optimisers[0].param_groups[0]["lr"])
            self.samples += len(indices)
            self.losses = self.losses + loss * len(indices)
        self.seen += self.samples


def refuse_unusable(loss: float, rates: list[float], minimum: int, fp16: bool) -> None:
    """Refuse training that diverged or was too short; of no minimum whatever comes is kept."""
    if not minimum:
        return
    if not math.isfinite(loss):
        raise SiteError(f"training diverged, its loss is {loss}: lower 'learning-rate'")
    if fp16 and not rates:
        raise SiteError(
            "no step had finite gradients in fp16: set 'precision' to 'fp32', or to 'bf16'"
        )
    rates = sorted(rates)
    steps = len(rates) - bisect_left(rates, SMALLEST_PART * rates[-1]) if rates else 0
    if steps < minimum:
        raise RefusedError(
            f"{steps} optimiser step(s) would be behind what leaves, and at least {minimum} "
            "must ('minimum-steps-per-reply'): raise 'local-epochs' or 'local-steps', or leave the "
            "site out"
        )


def counted_steps(
    own: CommonSettings,
    settings: CommonSettings,
    rounds: int,
    count: int,
    smallest: int,
    private: PrivateTraining | None = None,
    aside: bool = False,
) -> tuple[int, int]:
    """Return a site's steps in earlier rounds, and in all rounds that a schedule counts, if any.

    Each round is taken to be as long as this one.

    Args:
        own: of this training, whose steps a schedule counts: a round may have several.
        settings: the run's, by whose rounds 'rate-decay' counts.
        rounds: how many have ended.
        count: training samples.
        smallest: different samples that are behind each step.
        private: the training, where it is private.
        aside: whether it is in addition to the site's own, whose epochs may span rounds.
    """
    if private:
        steps = private.steps()
    elif is_scheduled(settings):
        paced = settings.epoch_steps and not aside
        steps = settings.pace if paced else steps_of(count, own, smallest)
    else:
        steps = settings.pace if settings.epoch_steps else steps_of(count, settings, smallest)
    return rounds * steps, settings.rounds * steps if is_scheduled(settings) else 0


def annealed(
    network: SiteNetwork, settings: CommonSettings, rounds: int, count: int, smallest: int
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
