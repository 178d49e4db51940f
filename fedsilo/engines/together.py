"""Train several simulated sites as one batch, before each answers its own message.

Each site has its own batches, dropout, moments and number of steps, and its result equals the
result of the usual training loop up to rounding. Each site then handles its message as usual, but
instead of training it takes its result of the common training.
"""

import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

import torch
from flwr.app import Context, Message, RecordDict
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.session import SiteSession, session_of
from fedsilo.client_app.training.compute import collect_unrepeatable_operations
from fedsilo.client_app.training.loop import (
    LocalTraining,
    count_steps,
    refuse_unusable,
    schedule,
    steps_of,
)
from fedsilo.client_app.training.optimisers import open_optimiser
from fedsilo.client_app.training.rates import rate_setter
from fedsilo.core.errors import FedsiloError
from fedsilo.core.messages import ARRAYS, CONFIG, SAMPLES, STEPS, TRAIN, Instruction
from fedsilo.core.seeding import derive_seed, generator
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.stacked import Rows, StackedNetwork
from fedsilo.strategies.wire.records import unbundle

_FUSED = ("adam", "adamw", "sgd", "adagrad")  # optimisers with a fused form
_PADDING = -100  # the label that cross-entropy ignores


@dataclass
class _Site:
    """One of the sites that are trained as one batch."""

    session: SiteSession
    content: RecordDict  # the message's records
    instruction: Instruction  # the message's instruction
    key: tuple[int, str]  # round and site, which key the random numbers of the message
    split: Split  # the training samples
    counted: tuple[int, int]  # steps in earlier rounds and in all rounds; see ``count_steps``
    batches: list[Tensor]  # the sample numbers of each step
    last: int  # the number of steps in the last pass

    def batch_key(self) -> Hashable:
        """Return a key that is equal for sites that can train as one batch.

        Sites with equal keys have the same round, received model, and input shape and type. If the
        learning rate changes over the run, they also have the same number of steps so far and in
        all rounds.
        """
        arrays = self.content.array_records[ARRAYS].values()
        # Equal identity means the same received model; comparing the values would cost a pass
        identities = tuple(id(array.data) for array in arrays)
        # A stack needs samples of equal shape; their number may differ, because steps are padded
        inputs = self.split.inputs
        return self.key[0], self.counted, inputs.shape[1:], inputs.dtype, identities


def train_together(messages: Iterable[tuple[Message, Context]]) -> None:
    """Train the sites of these messages as one batch, or as one per group with equal ``batch_key``.

    Each site later takes its own result in ``fit``. A site that cannot be opened here, the only
    site of a group, and all sites of a group that fails are left out. They train by themselves when
    they answer, and their replies then have any error.
    """
    groups: dict[Hashable, list[_Site]] = {}
    for message, context in messages:
        with suppress(FedsiloError):
            site = _open_site(message, context)
            if site.instruction.phase == TRAIN:
                groups.setdefault(site.batch_key(), []).append(site)
    for sites in groups.values():
        # A single site gains nothing from a stack, so it trains as usual when it answers
        if len(sites) > 1:
            with suppress(FedsiloError):
                _train(sites)


def _open_site(message: Message, context: Context) -> _Site:
    session, content = session_of(context), unbundle(message.content)
    instruction = Instruction.from_config(content[CONFIG])
    silo = session.silo
    if silo.features:
        silo = session.silo_for(content)
    split = silo.train
    settings, floor = session.sampling, session.limits.minimum_batch
    counted = (0, 0)
    if settings.rate_decay != "none" or settings.schedule != "constant" or settings.warm_up:
        steps = steps_of(len(split), settings, floor)
        counted = count_steps(steps, settings, instruction.round - 1)
    key = (instruction.round, session.silo.name)
    # Drawn like ``LocalTraining`` draws them, so that the loop would see the same batches
    rng = torch.Generator().manual_seed(derive_seed(settings.seed, "batches", *key))
    passes = list(schedule(len(split), settings, rng, floor))
    batches = list(chain.from_iterable(passes))
    return _Site(session, content, instruction, key, split, counted, batches, len(passes[-1]))


def _train(sites: list[_Site]) -> None:
    """Train sites that start from the same weights as one stack, and store each site's result.

    The result is in the site's ``session.trainers``. ``sites`` is sorted in place.
    """
    # Sites with more steps come first, so that the others drop out at the end
    sites.sort(key=lambda site: -len(site.batches))
    session = sites[0].session
    torch.set_num_threads(session.settings.threads)
    # All sites received the same weights, so the first one's network can be copied for all
    network = Lab(session, sites[0].content, sites[0].instruction).open().train()
    seed = session.sampling.seed
    rows = Rows(sources=[generator(seed, "training", *site.key) for site in sites])
    stack = StackedNetwork(network, len(sites), rows)
    with collect_unrepeatable_operations() as operations:
        losses, rates = _take_steps(stack, rows, sites)
    for number, site in enumerate(sites):
        arrays = {name: array[number] for name, array in stack.arrays.items()}
        steps = len(site.batches)
        sizes = torch.tensor([len(batch) for batch in site.batches])
        last = slice(steps - site.last, steps)
        mean = float((losses[number, last] * sizes[last]).sum() / sizes[last].sum())
        work = Counter({STEPS: steps, SAMPLES: int(sizes.sum())})
        trained = TrainedTogether(arrays, mean, rates[:steps], work, frozenset(operations))
        site.session.trainers.clear()  # a result is as large as the model
        site.session.trainers[site.key] = trained


def _take_steps(
    stack: StackedNetwork, rows: Rows, sites: Sequence[_Site]
) -> tuple[Tensor, list[float]]:
    """Take all steps of all sites. Afterwards ``stack`` has each site's trained arrays.

    Returns:
        The mean loss of each step, (sites, steps), which is 0 for steps that a site does not take;
        and the learning rate of each step.
    """
    settings, compute = sites[0].session.sampling, sites[0].session.compute
    optimiser = _open_optimiser(stack, settings)
    set_rates = rate_setter([optimiser], settings, *sites[0].counted)
    pick = compute.hold(torch.cat([site.split.inputs for site in sites]))
    numbers, truths, sizes = _plan_steps(sites)
    truths, lengths = compute.bring(truths), compute.bring(sizes)
    losses = torch.zeros(sizes.shape, device=compute.device)
    rates = list[float]()
    active = len(sites)  # the sites that still have steps to take
    for step, step_sizes in enumerate(sizes.T.tolist()):
        rows.sizes = [size for size in step_sizes if size]
        # Sites with fewer steps have finished; their rows leave the stack with their results
        if len(rows.sizes) < active:
            active = len(rows.sizes)
            stack.keep(active, optimiser)
        now = slice(active), step, slice(max(rows.sizes))
        if set_rates:
            set_rates()
        optimiser.zero_grad(set_to_none=True)
        with compute.autocast():
            # One batch of (sites * most) samples, which the stacked layers treat site by site
            logits = stack.network(float_inputs(pick(numbers[now].flatten())))
            each = nn.functional.cross_entropy(logits, truths[now].flatten(), reduction="none")
        means = rows.split(each).sum(1) / lengths[:active, step]
        # The sum of losses gives each site its own gradient, because sites share no parameters
        means.sum().backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
        optimiser.step()
        losses[:active, step] = means.detach()
        rates.append(optimiser.param_groups[0]["lr"])
    return losses.cpu(), rates


def _open_optimiser(stack: StackedNetwork, settings: CommonSettings) -> Optimizer:
    """Build the run's optimiser over the stacked parameters.

    The fused form is used if the settings ask for it, or if the optimiser is one of ``_FUSED``
    without further arguments.
    """
    has_fused_form = settings.optimiser.lower() in _FUSED and not settings.optimiser_arguments
    fused = settings.fused_optimiser or has_fused_form
    return open_optimiser(
        nn.ParameterList(stack.parameters()), replace(settings, fused_optimiser=fused)
    )


def _plan_steps(sites: Sequence[_Site]) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out the samples of all steps of all sites as three padded tensors.

    Sample numbers count through the sites' data one after another. A step with fewer samples is
    padded with the site's first sample, under a label that the loss ignores.

    Returns:
        Sample numbers and labels, (sites, steps, most), and the number of samples in each step,
        (sites, steps), 0 for steps that a site does not take.
    """
    most = 0  # samples of the largest step
    for site in sites:
        for batch in site.batches:
            most = max(most, len(batch))
    shape = len(sites), len(sites[0].batches), most
    numbers, first = torch.zeros(shape, dtype=torch.long), 0
    truths = torch.full(shape, _PADDING)
    for own, labels, site in zip(numbers, truths, sites, strict=True):
        padded = pad_sequence(site.batches, batch_first=True, padding_value=-1)
        part = slice(len(padded)), slice(padded.shape[1])
        own[part] = padded.clamp(min=0) + first
        # Padding indexes the last label with -1, and is masked before anybody reads it
        labels[part] = site.split.labels[padded].masked_fill(padded < 0, _PADDING)
        first += len(site.split)
    return numbers, truths, (truths != _PADDING).sum(2)


@dataclass(frozen=True)
class TrainedTogether:
    """A site's result of the common training, for the message that asked for it."""

    arrays: Mapping[str, Tensor]  # the network's parameters and buffers, by name
    loss: float  # the mean loss over the last pass
    rates: list[float]  # the learning rate of each step
    work: Counter[str]  # counts the steps and the samples that they used
    operations: frozenset[str]  # the operations that were not deterministic

    def __call__(self, training: LocalTraining) -> float:
        """Load this result into the network of ``training``, and return the mean loss.

        Raises:
            FedsiloError: see ``LocalTraining.run``.
        """
        for name in self.operations:
            warnings.warn(f"{name} does not have a deterministic implementation", stacklevel=1)
        # Merged, so that arrays which the stack lacks keep the values of the network
        training.network.load_state_dict(training.network.state_dict() | dict(self.arrays))
        training.work.update(self.work)
        refuse_unusable(self.loss, self.rates, training.minimum_steps, fp16=False)
        return self.loss
