"""Train several simulated sites as one batch, before each answers its own message.

Each site has its own batches, dropout, moments and number of steps, and its result equals the
loop's up to rounding. Each site then handles its message as usual; where it would train, it takes
the result of the common training.
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

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.session import SiteSession, session_of
from fedsilo.client_app.training.compute import noted_operations
from fedsilo.client_app.training.loop import (
    LocalTraining,
    count_steps,
    refuse_unusable,
    schedule,
    steps_of,
)
from fedsilo.client_app.training.optimisers import open_optimiser
from fedsilo.client_app.training.rates import rate_setter
from fedsilo.core.errors import FedsiloError, SettingError
from fedsilo.core.messages import ARRAYS, CONFIG, SAMPLES, STEPS, TRAIN, Instruction
from fedsilo.core.methods import METHODS, site_class
from fedsilo.core.one_line import listed, shown
from fedsilo.core.seeding import derive_seed, generator
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value, as_mapping
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.stacked import Rows, StackedNetwork
from fedsilo.strategies.wire.records import unbundle

_FUSED = ("adam", "adamw", "sgd", "adagrad")
# Optimisers that treat each number separately
_EACH_NUMBER = (*_FUSED, "rmsprop", "adadelta", "adamax", "nadam", "radam")
_PADDING = -100  # the label that cross-entropy ignores
# The values of settings with which sites can be trained as one batch
_ONLY: Mapping[str, tuple[Value, ...]] = {
    "privacy.sample-clip-norm": (0.0,),
    "network.name": ("auto", "conv", "vgg16-bn", "logistic", "mlp"),
    "train.loss": ("auto", "cross-entropy"),
    "train.class-weights": ("none",),
    "train.augmentation": ("",),
    "train.micro-batch": (0,),
    "train.epoch-steps": (0,),
    "train.optimiser-state": ("round",),
    "train.optimiser": _EACH_NUMBER,
    "machine.precision": ("auto", "fp32", "bf16"),
}


def check_vectorised(common: CommonSettings) -> None:
    """Refuse settings under which sites cannot be trained as one batch.

    Raises:
        SettingError: names the setting.
    """
    values = as_mapping(common)
    for key, allowed in _ONLY.items():
        value = values[key]
        if (value.lower() if isinstance(value, str) else value) not in allowed:
            wanted = listed([str(one) or "empty" for one in allowed])
            raise SettingError(
                f"setting 'machine.vectorised' is {common.vectorised}, but '{key}' is "
                f"{shown(value)}: sites are trained as one only if it is {wanted}; set "
                "'machine.vectorised' to 1"
            )
    plain = common.method in METHODS  # a plugin may extend such a method
    if not (plain and site_class(common.method).trains_plainly):
        raise SettingError(
            f"setting 'machine.vectorised' is {common.vectorised}, but a site of method "
            f"'{common.method}' does more than train the received model: set 'machine.vectorised' "
            "to 1"
        )


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

    def alike(self) -> Hashable:
        """Return a key that is equal for sites that can be trained as one batch."""
        arrays = self.content.array_records[ARRAYS].values()
        shape, kind = self.split.inputs.shape[1:], self.split.inputs.dtype
        return self.key[0], self.counted, shape, kind, *(id(array.data) for array in arrays)


def train_together(messages: Iterable[tuple[Message, Context]]) -> None:
    """Train these sites as one batch; each later picks up its own result in ``fit``.

    A site that cannot be opened is left out, and its own answer will tell the reason.
    """
    groups: dict[Hashable, list[_Site]] = {}
    for message, context in messages:
        with suppress(FedsiloError):
            site = _open_site(message, context)
            if site.instruction.phase == TRAIN:
                groups.setdefault(site.alike(), []).append(site)
    for sites in groups.values():
        if len(sites) > 1:
            with suppress(FedsiloError):
                _train(sites)


def _open_site(message: Message, context: Context) -> _Site:
    session, content = session_of(context), unbundle(message.content)
    instruction = Instruction.from_config(content[CONFIG])
    split = (session.silo_for(content) if session.silo.features else session.silo).train
    own, floor = session.sampling, session.limits.minimum_batch
    key, counted = (instruction.round, session.silo.name), (0, 0)
    if own.rate_decay != "none" or own.schedule != "constant" or own.warm_up:
        counted = count_steps(steps_of(len(split), own, floor), own, instruction.round - 1)
    rng = torch.Generator().manual_seed(derive_seed(own.seed, "batches", *key))
    passes = list(schedule(len(split), own, rng, floor))  # drawn like ``LocalTraining`` draws them
    batches = list(chain.from_iterable(passes))
    return _Site(session, content, instruction, key, split, counted, batches, len(passes[-1]))


def _train(sites: list[_Site]) -> None:
    """Train sites that begin with the same weights, and give each its result."""
    # Sites with more steps come first, so that the others drop out at the end
    sites.sort(key=lambda site: -len(site.batches))
    session = sites[0].session
    torch.set_num_threads(session.settings.threads)
    network = Lab(session, sites[0].content, sites[0].instruction).open().train()
    settings = session.sampling
    sources = [generator(settings.seed, "training", *site.key) for site in sites]
    rows = Rows(sources=sources)
    stack = StackedNetwork(network, len(sites), rows)
    with noted_operations() as operations:
        losses, rates = _steps(stack, rows, sites)
    for number, site in enumerate(sites):
        arrays = {name: array[number] for name, array in stack.arrays.items()}
        steps, sizes = len(site.batches), torch.tensor([len(batch) for batch in site.batches])
        last = slice(steps - site.last, steps)
        mean = float((losses[number, last] * sizes[last]).sum() / sizes[last].sum())
        work = Counter({STEPS: steps, SAMPLES: int(sizes.sum())})
        trained = TrainedTogether(arrays, mean, rates[:steps], work, frozenset(operations))
        site.session.trainers.clear()  # a result is as large as the model
        site.session.trainers[site.key] = trained


def _steps(stack: StackedNetwork, rows: Rows, sites: Sequence[_Site]) -> tuple[Tensor, list[float]]:
    """Take all steps; return mean losses (sites, steps) and the learning rate of each step."""
    session = sites[0].session
    settings, compute = session.sampling, session.compute
    fused = settings.optimiser.lower() in _FUSED and not settings.optimiser_arguments
    own = replace(settings, fused_optimiser=settings.fused_optimiser or fused)
    optimiser = open_optimiser(nn.ParameterList(stack.parameters()), own)
    set_rates = rate_setter([optimiser], settings, *sites[0].counted)
    pick = compute.hold(torch.cat([site.split.inputs for site in sites]))
    numbers, truths, sizes = _plan_steps(sites)
    truths, lengths = compute.bring(truths), compute.bring(sizes)
    losses = torch.zeros(sizes.shape, device=compute.device)
    rates, going = list[float](), len(sites)
    for step, of_step in enumerate(sizes.T.tolist()):
        rows.sizes = [size for size in of_step if size]
        # Sites with fewer steps have finished; their rows leave the stack with their results
        if len(rows.sizes) < going:
            stack.keep(going := len(rows.sizes), optimiser)
        now = slice(going), step, slice(max(rows.sizes))
        if set_rates:
            set_rates()
        optimiser.zero_grad(set_to_none=True)
        with compute.autocast():
            logits = stack.network(float_inputs(pick(numbers[now].flatten())))
            each = nn.functional.cross_entropy(logits, truths[now].flatten(), reduction="none")
        means = rows.split(each).sum(1) / lengths[:going, step]
        means.sum().backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
        optimiser.step()
        losses[:going, step] = means.detach()
        rates.append(optimiser.param_groups[0]["lr"])
    return losses.cpu(), rates


def _plan_steps(sites: Sequence[_Site]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the samples of all steps, their labels, and the number of samples in each step.

    The samples of all sites are numbered one site after another. A site with fewer samples in a
    step is padded with its first sample, under a label that the loss ignores. Without a step its
    size is 0.

    Returns:
        Sample numbers and labels, (sites, steps, most), and sizes, (sites, steps).
    """
    most = max(len(batch) for site in sites for batch in site.batches)
    shape = len(sites), len(sites[0].batches), most
    numbers, first = torch.zeros(shape, dtype=torch.long), 0
    truths = torch.full(shape, _PADDING)
    for own, labels, site in zip(numbers, truths, sites, strict=True):
        padded = pad_sequence(site.batches, batch_first=True, padding_value=-1)
        part = slice(len(padded)), slice(padded.shape[1])
        own[part] = padded.clamp(min=0) + first
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
        """Give the network of ``training`` this result.

        Raises:
            FedsiloError: see ``LocalTraining.run``.
        """
        for name in self.operations:
            warnings.warn(f"{name} does not have a deterministic implementation", stacklevel=1)
        training.network.load_state_dict(training.network.state_dict() | dict(self.arrays))
        training.work.update(self.work)
        refuse_unusable(self.loss, self.rates, training.minimum_steps, fp16=False)
        return self.loss
