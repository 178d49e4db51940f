"""Local training: an optimiser over shuffled batches, the same for every method compared."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
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
from fedsilo.core.errors import RefusedError, SiteError
from fedsilo.core.messages import SAMPLES, STEPS
from fedsilo.core.seeding import derive_seed, seed_generators
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.maths.dirichlet import annealing
from fedsilo.models.maths.pacing import epoch_of
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.site_network import SiteNetwork, evidences

Penalty = Callable[[], Tensor]
AfterStep = Callable[[Tensor, Optimizer], None]
Objective = Callable[[Tensor, Tensor], Tensor]


def batches(count: int, size: int, rng: torch.Generator, smallest: int = 1) -> list[Tensor]:
    """Shuffle the indices 0 to ``count`` - 1, and cut them into batches of ``size`` indices.

    The last batch may be smaller. If it has one sample, or fewer than ``smallest``, it is joined to
    the previous batch, which then has more than ``size`` samples. The gradient of so few samples
    would depend on too few patients, and batch norm may fail with one sample. A batch that is the
    only one stays as it is.

    Args:
        count: the number of samples in the epoch.
        size: the number of samples in a batch.
        rng: draws the order.
        smallest: the minimum number of samples in a batch, if the epoch has that many.
    """
    parts = list(torch.split(torch.randperm(count, generator=rng), size))
    # The joined batch is larger than ``size``, which harms less than a batch of one
    if len(parts) > 1 and len(parts[-1]) < max(smallest, 2):
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def schedule(
    count: int, settings: CommonSettings, rng: torch.Generator, smallest: int = 1
) -> Iterator[list[Tensor]]:
    """Yield the passes of a local training, where a pass is a list of batches of sample indices.

    If 'train.local-steps' is 0, there are 'train.local-epochs' passes over all samples. Otherwise
    there are 'train.local-steps' batches in total, and the last pass may be cut short.

    Args:
        count: the number of samples.
        settings: the length of the training and the batch size.
        rng: draws the order of each pass.
        smallest: the minimum number of samples in a batch, if the site has that many.
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
    """Count the passes over ``count`` samples in one round, as ``schedule`` makes them.

    A last pass that is cut short counts as a pass.
    """
    return sum(1 for _ in schedule(count, settings, torch.Generator().manual_seed(0), smallest))


def micro_batches(count: int, size: int) -> list[slice]:
    """Split a batch of ``count`` samples into slices of ``size`` samples, in order.

    If ``size`` is 0, or if the batch has at most ``size`` samples, the result is one slice. The
    last slice may be smaller, but a last slice of one sample is joined to the previous slice.
    """
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
    """Add a batch's gradients to the ``grad`` of the parameters, and return the batch's loss.

    The loss is the mean over the batch plus the penalty. If 'train.micro-batch' is above 0, the
    batch is computed in parts of that many samples, to save memory. The gradients are still those
    of the whole batch, except that batch norm uses the statistics of each part.

    Args:
        objective: maps inputs and labels to a mean loss.
        inputs: the batch, on the device.
        labels: the labels of the batch (batch, ...), on the device.
        settings: the run's settings, which give 'train.micro-batch'.
        compute: the device and the precision.
        penalty: returns a term that is added once per batch; None for no penalty.
        scaler: scales the gradients, but not the returned loss; None for no scaling.

    Returns:
        The loss, a detached scalar on the device.
    """
    total = torch.zeros((), device=inputs.device)
    parts = [slice(0, len(labels))]
    if settings.micro_batch:
        parts = micro_batches(len(labels), settings.micro_batch)
    for part in parts:
        with compute.autocast():
            loss = objective(float_inputs(inputs[part]), labels[part])
        # The loss of a part is a mean over it, so its share makes the sum of parts the batch's mean
        share = (part.stop - part.start) / len(labels)
        if share < 1:
            loss = loss * share
        # The penalty belongs to the batch, so it is added with the first part only
        if penalty and part.start == 0:
            loss = loss + penalty()
        scaled = loss
        if scaler:
            scaled = scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
        total += loss.detach()
    return total


def steps_of(count: int, settings: CommonSettings, smallest: int = 1) -> int:
    """Count the optimiser steps that one round over ``count`` samples takes, one step per batch.

    Args:
        count: the number of samples.
        settings: the length of the training and the batch size.
        smallest: the minimum number of samples in a batch, if the site has that many.
    """
    rng = torch.Generator().manual_seed(0)
    return sum(map(len, schedule(count, settings, rng, smallest)))


@dataclass
class LocalTraining:
    """One training of a network at a site: model, samples, settings and length.

    ``Lab.fit`` fills in the fields from the run's settings and the hospital's limits.
    """

    # The network, on the compute device; ``run`` trains it in place
    network: SiteNetwork
    # Training inputs and labels
    split: Split
    # The length, the batch size, the optimiser and the seed
    settings: CommonSettings
    # Device and precision
    compute: Compute
    # Round and site, or more; every random number of the training depends on it
    key: tuple[int | str, ...]
    # The loss of a batch's inputs and labels, or None for the network's own
    objective: Objective | None = None
    # A term that is added to each batch's loss, or None
    penalty: Penalty | None = None
    # Called after each optimiser step with the batch's inputs and the optimiser, or None
    after_step: AfterStep | None = None
    # A second optimiser that steps after the network's, by the same gradients, or None
    beside: Optimizer | None = None
    # The passes, each a list of batches of sample indices, or None for the passes of the settings
    plan: Iterable[list[Tensor]] | None = None
    # The optimiser whose moments the training continues from, or None for a new one
    optimiser: Optimizer | None = None
    # Called with the index of a pass, from 0, before the pass begins, or None
    before_pass: Callable[[int], None] | None = None
    # Steps in earlier rounds and in all rounds, by which a schedule sets the learning rate (see
    # ``count_steps``), or None for a constant rate
    counted: tuple[int, int] | None = None
    # The fewest optimiser steps whose result may leave, or 0 to keep any result
    minimum_steps: int = 1
    # The fewest different samples that each step must rest on
    minimum_batch: int = 1
    # The weight of each sample (n,) in the loss, or None if all count the same
    weights: Tensor | None = None
    # DP-SGD, which draws the batches and bounds each patient's gradient, or None
    private: PrivateTraining | None = None
    # Counts the optimiser steps and the samples that they saw
    work: Counter[str] = field(default_factory=Counter)

    @property
    def samples(self) -> int:
        """The number of training samples; in a private run the reported number."""
        if self.private:
            return self.private.reported
        return len(self.split.labels)

    def run(self) -> float:
        """Train the network in place, and return the mean loss per sample in the last pass.

        The mean is 0 if the last pass had no samples, or if fp16 skipped all its steps. The numbers
        of steps and samples are added to ``work``. The loss and the number of steps are not checked
        if ``minimum_steps`` is 0. A private training at a real hospital does not check its loss
        either, because an error could reveal a patient.

        Raises:
            SiteError: the loss is not finite, or no step in fp16 had finite gradients.
            RefusedError: a batch has too few different samples for the hospital, or too few steps
                have a learning rate near the largest one.
        """
        self.network.train()
        steps, count, passes = _Steps(self), len(self.split.labels), self.plan
        if self.private:
            passes = self.private.plan(count)
        elif passes is None:
            # The order has its own seed, so that changes in dropout do not change the batches
            seed = derive_seed(self.settings.seed, "batches", *self.key)
            rng = torch.Generator().manual_seed(seed)
            passes = schedule(count, self.settings, rng, self.minimum_batch)
        frozen: AbstractContextManager[None] = nullcontext()
        # A penalty and ``after_step`` run outside autocast, and may use the network
        half = self.compute.bf16 or self.compute.fp16
        if half and not (self.private or self.penalty or self.after_step):
            frozen = self.compute.convert_frozen(self.network)
        # One seed for all draws of the training: dropout's follow one another over the batches
        seed, device = self.settings.seed, self.compute.device
        with seed_generators(seed, "training", *self.key, device=device), frozen:
            for number, batches_of_pass in enumerate(passes):
                if self.before_pass:
                    self.before_pass(number)
                if self.minimum_batch > 1:
                    refuse_small(batches_of_pass, self.minimum_batch, self.weights)
                steps.take(batches_of_pass)
            mean = float(steps.losses) / max(1, steps.samples)
            self.work.update({STEPS: len(steps.rates), SAMPLES: steps.seen})
            # Not even a refusal may depend on a private loss of a real hospital's patients
            judged = mean
            if self.private is not None and self.private.release.alone:
                judged = 0.0
            refuse_unusable(judged, steps.rates, self.minimum_steps, self.compute.fp16)
        return mean


class _Steps:
    """Takes the optimiser steps of a training, and adds up their losses and samples."""

    def __init__(self, training: LocalTraining) -> None:
        network, settings, compute = training.network, training.settings, training.compute
        self.rates: list[float] = []  # the learning rate of each step that was taken
        self.seen = 0  # the samples in all steps
        self.samples = 0  # the samples in the last pass
        self.losses: Tensor | float = 0.0  # the sum over the samples of the last pass
        self._optimisers = [training.optimiser or open_optimiser(network, settings)]
        if training.beside:
            self._optimisers.append(training.beside)
        self._scaler = compute.scaler() if compute.fp16 else None
        add = add_gradients
        if training.private:
            add = partial(training.private.add_gradients, network)
        self._add_gradients = partial(
            add,
            training.objective or network.loss,
            settings=settings,
            compute=compute,
            penalty=training.penalty,
            scaler=self._scaler,
        )
        split = training.split
        self._pick, self._label = compute.hold(split.inputs), compute.hold(split.labels)
        self._augment = None
        if settings.augmentation:
            self._augment = augmenter(settings, training.key, compute.device)
        self._set_rates = None
        if training.counted:
            self._set_rates = rate_setter(self._optimisers, settings, *training.counted)
        self._after_step = training.after_step

    def take(self, batches_of_pass: list[Tensor]) -> None:
        """Take the optimiser steps of one pass over the samples, one for each batch.

        Each step augments the batch, sets the learning rate and computes the gradients. Then all
        optimisers step, and ``after_step`` is called. ``losses`` and ``samples`` become the pass's
        summed loss and its number of samples. In fp16, a batch with gradients that are not finite
        is left out of all totals, and ``after_step`` is not called for it.

        Args:
            batches_of_pass: the sample indices of each batch.
        """
        self.losses, self.samples = 0.0, 0
        for indices in batches_of_pass:
            batch, labels = self._pick(indices), self._label(indices)
            if self._augment:
                batch, labels = self._augment(batch, labels)
            if self._set_rates:
                self._set_rates()
            self._optimisers[0].zero_grad(set_to_none=True)
            loss = self._add_gradients(batch, labels)
            if self._scaler:
                if not scaled_step(self._optimisers, self._scaler):
                    continue
            else:
                for optimiser in self._optimisers:
                    optimiser.step()
            # The network's own gradients stay until the next step, because ``after_step`` may read
            # them
            for optimiser in self._optimisers[1:]:
                optimiser.zero_grad(set_to_none=True)
            if self._after_step:
                self._after_step(batch, self._optimisers[0])
            self.rates.append(self._optimisers[0].param_groups[0]["lr"])
            self.samples += len(indices)
            self.losses = self.losses + loss * len(indices)
        self.seen += self.samples


def refuse_unusable(loss: float, rates: list[float], minimum: int, fp16: bool) -> None:
    """Check that a training did not diverge, and that enough of its steps count.

    A step counts if its learning rate is at least a hundredth of the largest learning rate.

    Args:
        loss: the mean loss over the last pass.
        rates: the learning rate of each step that was taken. Steps with gradients that were not
            finite are not in the list.
        minimum: the minimum number of steps that must count; 0 turns off all checks.
        fp16: whether the training was in fp16, where such steps are skipped.

    Raises:
        SiteError: the loss is not finite, or in fp16 no step was taken.
        RefusedError: fewer than ``minimum`` steps count.
    """
    if not minimum:
        return
    if not math.isfinite(loss):
        raise SiteError(f"training diverged, its loss is {loss}: lower 'train.learning-rate'")
    if fp16 and not rates:
        raise SiteError(
            "no step had finite gradients in fp16: set 'machine.precision' to 'fp32', or to 'bf16'"
        )
    # A step with a tiny rate hides nothing, so only steps near the largest rate count
    rates = sorted(rates)
    steps = 0
    if rates:
        steps = len(rates) - bisect_left(rates, SMALLEST_PART * rates[-1])
    if steps < minimum:
        raise RefusedError(
            f"the result would rest on {steps} optimiser step(s), but at least {minimum} are "
            "needed ('minimum-steps-per-reply'): raise 'train.local-epochs' or "
            "'train.local-steps', or leave the site out"
        )


def continue_from_earlier_rounds(
    training: LocalTraining, settings: CommonSettings, rounds: int, aside: tuple[str, ...] = ()
) -> None:
    """Let a training's learning rate and evidential KL weight continue from earlier rounds.

    If the network is evidential, ``training.before_pass`` is set to a function that increases the
    weight of the loss's KL term. ``training.counted`` is set to the numbers of steps in earlier
    rounds and in all rounds, in two cases:

    - The run has 'train.rate-decay'.
    - The run has a schedule or a warm-up of the learning rate, and ``training.plan`` is None, so
      the settings choose the batches.

    Args:
        training: the training, changed in place. Its fields ``private``, ``plan`` and
            ``minimum_batch`` are read.
        settings: the run's settings. ``training.settings`` may have another number of steps.
        rounds: the number of finished rounds.
        aside: a key that names a further training in the same phase; empty for the main training.
    """
    if evidences(training.network):
        training.before_pass = anneal_evidence(training, settings, rounds)
    # A schedule does not count the steps of a plan
    has_schedule = settings.schedule != "constant" or settings.warm_up > 0
    if settings.rate_decay != "none" or (has_schedule and training.plan is None):
        training.counted = count_steps(round_steps(training, settings, aside), settings, rounds)


def round_steps(
    training: LocalTraining, settings: CommonSettings, aside: tuple[str, ...] = ()
) -> int:
    """Return the number of optimiser steps in a round, which the learning rate is based on.

    The first rule that fits decides. A warm-up of the learning rate counts as a schedule.

    - A private training has as many steps as its DP-SGD takes in a round.
    - If 'train.epoch-steps' is set, the number is 'train.pace'. This rule is not for a further
      training (``aside``) with a schedule.
    - Otherwise the number is that of the batches in a round. With a schedule, ``training.settings``
      gives the length of the round. Without a schedule, ``settings`` does.

    Args:
        training: the training, with its samples and its own settings.
        settings: the run's settings.
        aside: a key that names a further training in the same phase; empty for the main training.
    """
    if training.private:
        return training.private.steps()
    counted, paced = settings, settings.epoch_steps > 0
    if is_scheduled(settings):
        counted, paced = training.settings, paced and not aside
    if paced:
        return settings.pace
    return steps_of(training.samples, counted, training.minimum_batch)


def count_steps(steps: int, settings: CommonSettings, rounds: int) -> tuple[int, int]:
    """Return a site's number of optimiser steps in earlier rounds, and its number in the whole run.

    Each round counts as ``steps`` steps. The second number is 0 if the learning rate has neither a
    schedule nor a warm-up.

    Args:
        steps: the optimiser steps of one round.
        settings: the number of rounds, and the schedule of the learning rate.
        rounds: the number of finished rounds.
    """
    before, total = rounds * steps, 0
    if is_scheduled(settings):
        total = settings.rounds * steps
    return before, total


def anneal_evidence(
    training: LocalTraining, settings: CommonSettings, rounds: int
) -> Callable[[int], None]:
    """Return a function that sets the evidential KL weight before each pass of this round.

    The weight scales the Kullback-Leibler term of an evidential loss. The function takes the index
    of a pass in this round, from 0. The weight is t / 10, at most 1, where t is the number of
    passes before this one, over all rounds. If an epoch spans several rounds ('train.epoch-steps'),
    t is the index of the epoch plus that of the pass.

    Args:
        training: the training; the evidential losses of its network get the weight.
        settings: the number of epochs in a round.
        rounds: the number of finished rounds.
    """
    if settings.epoch_steps:
        before = epoch_of(rounds + 1, settings)
    else:
        before = rounds * passes_of(training.samples, settings, training.minimum_batch)

    def anneal(number: int) -> None:
        for evidence in evidences(training.network):
            evidence.kl_weight = annealing(before + number)

    return anneal
