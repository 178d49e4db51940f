"""Train several simulated sites as one batch, before each answers its own message.

Each site has its own weights, batches, dropout, moments and number of steps, and its result equals
the result of the usual training loop up to rounding. What a site trains is found by a rehearsal:
its method runs until it calls ``Lab.fit``, and stops there. Once all sites of a group have been
trained, each handles its message as usual, but ``Lab.fit`` takes the result of the common training.
A method with several trainings is rehearsed again after each of them.
"""

import warnings
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import NoReturn

import torch
from flwr.app import Context, Message
from torch import Tensor

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.session import SiteSession, session_of
from fedsilo.client_app.training.compute import collect_unrepeatable_operations
from fedsilo.client_app.training.loop import LocalTraining, refuse_unusable, schedule
from fedsilo.client_app.training.optimisers import open_optimiser
from fedsilo.client_app.training.terms import GradientSum, StackableLoss, Term
from fedsilo.core.errors import FedsiloError
from fedsilo.core.messages import CONFIG, SAMPLES, STEPS, TRAIN, Instruction
from fedsilo.core.seeding import derive_seed
from fedsilo.engines.stacked_steps import HeldSamples, Planned, StackedSteps, trained_module
from fedsilo.strategies.wire.records import unbundle

_Asked = Sequence[tuple[Message, Context]]


@dataclass
class _Site:
    """One of the sites that are trained as one batch."""

    asked: tuple[Message, Context]
    session: SiteSession
    # The next training that has no result yet
    training: LocalTraining
    planned: Planned


def train_together(messages: _Asked, held: HeldSamples) -> bool:
    """Train simulated sites in batches on the device, before each of them answers its message.

    Sites share a batch only if their trainings have the same round, settings and shapes. The result
    of a site is kept in its session until the site answers, and replaces a training then. Results
    of earlier calls are dropped.

    A site trains by itself when it answers if no batch can hold its training, or if its batch
    failed with a FedsiloError. Any other error of a batch is raised here.

    Args:
        messages: training messages, each with the context of its site.
        held: the samples that stay on the device between rounds.

    Returns:
        False if a site's training can never share a batch, for example because of sample weights or
        differential privacy. Otherwise True.
    """
    for _, context in messages:
        with suppress(FedsiloError):
            session_of(context).trainers.clear()  # a result is as large as the model
    all_stack = True
    while messages:
        sites = _rehearse_all(messages)
        stackable = [site for site in sites if _is_stackable(site.training)]
        all_stack = all_stack and len(stackable) == len(sites)
        messages = _train_groups(stackable, held)
    return all_stack


def _rehearse_all(messages: _Asked) -> list[_Site]:
    """Find the training that comes next at each site.

    For this, the site's method runs up to that training, and nothing is trained. The messages are
    training messages, each with the context of its site. Sites are left out if they have no
    training left, or if their method raises a FedsiloError.
    """
    sites = []
    for message, context in messages:
        with suppress(FedsiloError):
            site = _rehearse(message, context)
            if site:
                sites.append(site)
    return sites


def _train_groups(sites: Sequence[_Site], held: HeldSamples) -> _Asked:
    """Carry out the next training of each site, in batches of sites that can train together.

    ``_group_of`` decides which sites share a batch. A site that is alone in its group is not
    trained here. Some methods train several times for one message. Every such training except the
    last, for example that of a head, has a name in its key.

    Returns:
        The messages of the sites that were trained and have another training to do.
    """
    groups: dict[Hashable, list[_Site]] = {}
    for site in sites:
        groups.setdefault(_group_of(site.training), []).append(site)
    unfinished = []
    for group in groups.values():
        # A single site gains nothing from a stack, so it trains as usual when it answers
        if len(group) > 1 and _try_to_train(group, held):
            unfinished += [site.asked for site in group if len(site.training.key) > 2]
    return unfinished


class _ReachedTraining(Exception):
    """Ends a rehearsal at the first training that has no result yet."""

    def __init__(self, training: LocalTraining) -> None:
        super().__init__()
        self.training = training


def _stop(training: LocalTraining) -> NoReturn:
    raise _ReachedTraining(training)


def _rehearse(message: Message, context: Context) -> _Site | None:
    """Run a site's method up to its next training, to find out which training the site will do.

    A method may train several times for one message. If a training has already been done together
    with other sites, its stored result is loaded, and the method goes on. Nothing is trained,
    measured, stored or sent, because the site does so later when it answers.

    Returns:
        The site with the planned training. None if the message is not for training, or if all its
        trainings have results.
    """
    session, content = session_of(context), unbundle(message.content)
    instruction = replace(Instruction.from_config(content[CONFIG]), evaluate=False)
    if instruction.phase != TRAIN:
        return None
    lab = Lab(session, content, instruction)
    lab.run_training = _stop
    try:
        # The site's own answer reports again whatever earlier trainings report here
        with collect_unrepeatable_operations():
            session.method.train(lab)
    except _ReachedTraining as reached:
        training = reached.training
        return _Site((message, context), session, training, _plan(training))
    return None


def _plan(training: LocalTraining) -> Planned:
    """Plan the batches of a training, exactly as ``LocalTraining.run`` would choose them.

    If the training has a ``plan``, the batches of that plan are used. Otherwise they are drawn with
    the run's seed and the training's key, which has the round, the site and perhaps a name.
    """
    passes = training.plan
    if passes is None:
        seed = derive_seed(training.settings.seed, "batches", *training.key)
        rng = torch.Generator().manual_seed(seed)
        passes = schedule(len(training.split), training.settings, rng, training.minimum_batch)
    passes = list(passes)
    return Planned(training, list(chain.from_iterable(passes)), len(passes[-1]))


def _is_stackable(training: LocalTraining) -> bool:
    """Tell whether a training can share a batch with those of other sites (see ``StackedSteps``).

    The training must accept batches of one sample, and use the run's optimiser. It must not have
    sample weights, differential privacy or a function before each pass. The loss decides on the
    rest:

    - A ``StackableLoss``, which is a method's own loss for several sites, allows a second optimiser
      of the same type and options as the run's. It allows no penalty and no action after each step.
    - The network's own ``losses`` allow a ``Term`` as penalty, and a ``GradientSum`` after each
      step. They allow no second optimiser.

    With any other loss, the result is False.
    """
    further = (training.optimiser, training.before_pass, training.weights, training.private)
    if training.minimum_batch > 1 or any(one is not None for one in further):
        return False
    if isinstance(training.objective, StackableLoss):
        # A term names weights as the network does, which in the loss's parts have other names
        adds_nothing = training.penalty is None and training.after_step is None
        return adds_nothing and _has_run_optimisers(training)
    has_own_loss = training.objective is None and training.beside is None
    has_terms = training.penalty is None or isinstance(training.penalty, Term)
    has_sums = training.after_step is None or isinstance(training.after_step, GradientSum)
    return has_own_loss and has_terms and has_sums and hasattr(training.network, "losses")


def _has_run_optimisers(training: LocalTraining) -> bool:
    """Tell whether a training's second optimiser has the type and options of the run's optimiser.

    A training without a second optimiser also gives True. If the result is True, a single optimiser
    can train all weights, instead of two.
    """
    if training.beside is None:
        return True
    first = open_optimiser(training.network, training.settings)
    return type(first) is type(training.beside) and first.defaults == training.beside.defaults


def _group_of(training: LocalTraining) -> Hashable:
    """Build the key by which trainings are grouped. Trainings with equal keys share a batch.

    The key is made of these:

    - the round, and the name of the training if another one follows at the site in this round
    - the settings, except 'local-steps'
    - the shape and type of the inputs
    - the names, shapes and types of the arrays, and which of them are trained
    - whether there is a penalty, and whether there is an action after each step
    - the numbers of steps before this round and in all rounds, if the learning rate depends on them
    """
    round_, _, *aside = training.key
    arrays = []
    for name, array in trained_module(training).state_dict(keep_vars=True).items():
        arrays.append((name, array.shape, array.dtype, array.requires_grad))
    # A stack needs samples of equal shape; their number may differ, because steps are padded
    inputs = training.split.inputs
    # The batches are planned already, so a site's own number of steps does not matter any more
    settings = replace(training.settings, local_steps=0)
    added = training.penalty is None, training.after_step is None
    shape = tuple(inputs.shape[1:]), inputs.dtype
    return round_, *aside, settings, training.counted, shape, added, tuple(arrays)


def _try_to_train(sites: list[_Site], held: HeldSamples) -> bool:
    """Train the sites of a group as one batch, and return whether this succeeded.

    If a FedsiloError ends the training, the result is False. All sites of the group then train by
    themselves, and the site that causes the error raises it again.
    """
    try:
        _train(sites, held)
    except FedsiloError:
        return False  # one of them raises it again when it trains by itself
    return True


def _train(sites: list[_Site], held: HeldSamples) -> None:
    """Train the sites of a group as one batch, and store each site's result in its session.

    A result has the trained arrays, the summed gradients, the mean loss per sample over the last
    pass, the learning rate of each step, and the numbers of steps and samples. The order of
    ``sites`` changes: sites with more steps come first.
    """
    # Sites with more steps come first, so that the others drop out at the end
    sites.sort(key=lambda site: -len(site.planned.batches))
    steps = StackedSteps([site.planned for site in sites], held)
    with collect_unrepeatable_operations() as operations:
        losses = steps.take_all()
    for number, site in enumerate(sites):
        count = len(site.planned.batches)
        sizes = torch.tensor([len(batch) for batch in site.planned.batches])
        last = slice(count - site.planned.last, count)
        # A step's loss is a mean over its batch, so a short last batch must count less
        mean = float((losses[number, last] * sizes[last]).sum() / sizes[last].sum())
        site.session.trainers[site.training.key] = TrainedTogether(
            {name: array[number] for name, array in steps.stack.arrays.items()},
            {name: total[number] for name, total in steps.gradient_sums.items()},
            mean,
            steps.rates[:count],
            Counter({STEPS: count, SAMPLES: int(sizes.sum())}),
            frozenset(operations),
        )


@dataclass(frozen=True)
class TrainedTogether:
    """A site's result of a common training, for the message that asked for it."""

    arrays: Mapping[str, Tensor]  # trained parameters and buffers of ``trained_module``, by name
    gradient_sums: Mapping[str, Tensor]  # a ``GradientSum``, by the parameter's name
    loss: float  # the mean loss over the last pass
    rates: list[float]  # the learning rate of each step
    work: Counter[str]  # counts the steps and the samples that they used
    operations: frozenset[str]  # the operations that were not deterministic

    def __call__(self, training: LocalTraining) -> float:
        """Load the stored result in place of a site's own training; return the mean loss.

        The arrays are loaded into the module that ``training`` trains. The counted work, the
        gradient sums and any warnings about non-deterministic operations are passed on as well.

        Raises:
            FedsiloError: the loss or the rates are unusable; see ``LocalTraining.run``.
        """
        for name in self.operations:
            warnings.warn(f"{name} does not have a deterministic implementation", stacklevel=1)
        module = trained_module(training)
        # Merged, so that arrays which the stack lacks keep the values of the network
        module.load_state_dict(module.state_dict() | dict(self.arrays))
        if isinstance(training.after_step, GradientSum):
            training.after_step.sums.update(self.gradient_sums)
        training.work.update(self.work)
        refuse_unusable(self.loss, self.rates, training.minimum_steps, fp16=False)
        return self.loss
