"""The optimiser steps of several sites' trainings, taken as one batch on one device.

On a GPU no step waits for the device: sizes, labels and samples are there before the first step,
losses stay there until the last, and what a step still copies comes from pinned memory.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.client_app.training.optimisers import open_optimiser
from fedsilo.client_app.training.rates import rate_setter
from fedsilo.client_app.training.terms import GradientSum, StackableLoss, Term
from fedsilo.core.seeding import derive_seed
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.encoders import float_inputs
from fedsilo.models.networks.stacked import Rows, StackedNetwork

_FUSED = ("adam", "adamw", "sgd", "adagrad")  # optimisers with a fused form
_KEPT = 4  # the most groups of sites whose samples stay on the device

Pick = Callable[[Tensor], Tensor]


@dataclass
class Planned:
    """A training of one site, and its batches."""

    training: LocalTraining
    # The sample numbers of each step
    batches: list[Tensor]
    # The number of steps in the last pass
    last: int


class HeldSamples:
    """Keeps the joined samples of groups of sites on the device from round to round.

    The groups that were used last are kept. ``Compute.hold`` decides whether samples fit on a GPU;
    if not, it streams them.
    """

    def __init__(self) -> None:
        self._picks: dict[Hashable, tuple[Sequence[Tensor], Pick]] = {}

    def pick(self, inputs: Sequence[Tensor], compute: Compute) -> Pick:
        """Join the samples of several sites, and return a function that picks samples from them.

        The function takes sample numbers (n,), and returns these samples on the device. Samples are
        numbered from 0 across the sites of ``inputs``, in order. The functions of the four most
        recently used combinations of sites are kept, and returned again for the same tensors.

        Args:
            inputs: the samples of each site.
            compute: the device.
        """
        # Sessions keep a site's samples as the same tensors. They are kept here as well, so their
        # ids cannot become those of other tensors
        key = tuple(id(own) for own in inputs)
        # Removed here and added again below, so that the dictionary's first group is the one that
        # was not used for the longest time
        kept = self._picks.pop(key, None)
        if kept is None:
            kept = inputs, compute.hold(torch.cat(list(inputs)))
        while len(self._picks) >= _KEPT:
            del self._picks[next(iter(self._picks))]
        self._picks[key] = kept
        return kept[1]


class StackedSteps:
    """All optimiser steps of several trainings that differ in weights, samples and batches only.

    Args:
        sites: the trainings, those with more steps first. They have the same settings, networks
            with the same arrays, and terms with the same function.
        held: the samples on the device.

    Attributes:
        stack: the networks, whose arrays are trained in place.
        gradient_sums: the sums of a ``GradientSum``, (sites, ...) by name; empty without one.
        rates: the learning rate of each step.
    """

    def __init__(self, sites: Sequence[Planned], held: HeldSamples) -> None:
        first = sites[0].training
        self._compute, settings = first.compute, first.settings
        # The thread count changes the summation order, so it must be that of the usual training
        torch.set_num_threads(settings.threads)
        self._rows = Rows(states=[_dropout_state(site.training) for site in sites])
        for site in sites:
            site.training.network.train()
        self.stack = StackedNetwork([trained_module(site.training) for site in sites], self._rows)
        # The first site's loss reads the first site's networks, which are the stack now
        self._losses = cast(Callable[[Tensor, Tensor], Tensor], first.network.losses)
        if isinstance(first.objective, StackableLoss):
            self._losses = first.objective.losses
        self._optimiser = _open_optimiser(self.stack, settings)
        self._set_rates = None
        if first.counted:
            self._set_rates = rate_setter([self._optimiser], settings, *first.counted)
        self.rates: list[float] = []
        self._term, self._constants = _stack_terms(sites)
        self._adder: GradientSum | None = None
        self.gradient_sums: dict[str, Tensor] = {}
        if isinstance(first.after_step, GradientSum):
            trained = self.stack.trained
            self._adder = GradientSum({name: trained[name] for name in first.after_step.weights})
            self.gradient_sums = dict(self._adder.sums)
        self._pick = held.pick([site.training.split.inputs for site in sites], self._compute)
        numbers, real, labels = _plan_steps(sites)
        self._numbers, self._sizes = numbers, real.sum(2)
        self._labels, self._real = self._compute.bring(labels), self._compute.bring(real)
        self._lengths = self._compute.bring(self._sizes)

    def take_all(self) -> Tensor:
        """Take all optimiser steps of all sites, step by step, with all sites at once.

        A site with fewer steps drops out when it has taken them. Afterwards, the attribute
        ``stack`` has each site's trained arrays.

        Returns:
            The mean loss of each step, penalty included, (sites, steps) on the CPU. It is 0 for
            steps that a site does not take.
        """
        losses = torch.zeros(self._sizes.shape, device=self._compute.device)
        for step, step_sizes in enumerate(self._sizes.T.tolist()):
            sizes = [size for size in step_sizes if size]
            # Sites with fewer steps have finished; their rows leave the stack with their results
            if self._rows.sizes and len(sizes) < len(self._rows.sizes):
                self._keep(len(sizes))
            self._rows.sizes = sizes
            losses[: len(sizes), step] = self._take(step)
        return losses.cpu()

    def _take(self, step: int) -> Tensor:
        """Take one optimiser step for all sites that still have steps, with one backward pass.

        Returns:
            The mean loss of each site before the step, penalty included, (sites,) on the device.
        """
        sizes = self._rows.sizes
        now = slice(len(sizes)), step, slice(max(sizes))
        counts = self._rows.counts = self._lengths[: len(sizes), step]
        if self._set_rates:
            self._set_rates()
        self._optimiser.zero_grad(set_to_none=True)
        with self._compute.autocast():
            # One batch of (sites * most) samples, which the stacked layers treat site by site
            inputs = float_inputs(self._pick(self._numbers[now].flatten()))
            each = self._rows.split(self._losses(inputs, self._labels[now].flatten()))
        means = (each * self._real[now]).sum(1) / counts
        if self._term:
            weights = [self.stack.trained[name] for name in self._term.weights]
            means = means + torch.vmap(self._term.function)(weights, *self._constants)
        # The sum of losses gives each site its own gradient, because sites share no parameters
        means.sum().backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
        self._optimiser.step()
        if self._adder:
            self._adder()
        self.rates.append(self._optimiser.param_groups[0]["lr"])
        return means.detach()

    def _keep(self, sites: int) -> None:
        """Drop all sites except the first ``sites`` from the stack.

        Sites are sorted by their number of steps, the most first, so the dropped sites have taken
        all their steps.
        """
        self.stack.keep(sites, self._optimiser)
        self._constants = [[one[:sites] for one in constants] for constants in self._constants]
        if self._adder:
            # Views: what is added to them is added to ``gradient_sums``
            trained = self.stack.trained
            self._adder.weights = {name: trained[name] for name in self._adder.weights}
            for name, total in self._adder.sums.items():
                self._adder.sums[name] = total[:sites]


def trained_module(training: LocalTraining) -> nn.Module:
    """Return the module that holds all weights on which the loss of a training depends.

    It is the training's network. If the method has its own loss for several sites at once (a
    ``StackableLoss``), the module holds everything that this loss uses.
    """
    if isinstance(training.objective, StackableLoss):
        return training.objective.parts
    return training.network


def _dropout_state(training: LocalTraining) -> Tensor:
    """Return the initial state of the random generator from which a training draws its dropout.

    The run's seed and the training's key decide the state. The key has the round, the site and
    perhaps a name. A site that trains alone, outside a batch, starts from the same state.
    """
    seed = derive_seed(training.settings.seed, "training", *training.key)
    return torch.Generator(training.compute.device).manual_seed(seed).get_state()


def _stack_terms(sites: Sequence[Planned]) -> tuple[Term | None, list[list[Tensor]]]:
    """Join the penalty terms of several sites, so that one call computes all of them.

    A term has a function of the weights and groups of constant arrays. All sites use the function
    of the first site, with their own constants.

    Returns:
        The first site's term, and for each group a list of arrays. Each array is stacked over the
        sites, (sites, ...). If no site has a penalty, the term is None and the list is empty.
    """
    terms = [site.training.penalty for site in sites if isinstance(site.training.penalty, Term)]
    if not terms:
        return None, []
    stacked = []
    for constants in zip(*[term.constants for term in terms], strict=True):
        stacked.append([torch.stack(own) for own in zip(*constants, strict=True)])
    return terms[0], stacked


def _open_optimiser(stack: StackedNetwork, settings: CommonSettings) -> Optimizer:
    """Open the run's optimiser over the stacked parameters of several sites.

    PyTorch's fused form updates all parameters in one operation. It is used if the settings ask for
    it. It is also used for Adam, AdamW, SGD and Adagrad if the settings give the optimiser no
    arguments.
    """
    has_fused_form = settings.optimiser.lower() in _FUSED and not settings.optimiser_arguments
    fused = settings.fused_optimiser or has_fused_form
    parameters = nn.ParameterList(stack.trained.values())
    return open_optimiser(parameters, replace(settings, fused_optimiser=fused))


def _plan_steps(sites: Sequence[Planned]) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out the samples of all steps of all sites as three padded tensors.

    Samples are numbered from 0 across all sites, one site after another. A step with fewer samples
    than the largest step of all is filled up with the site's first sample. The sites must be sorted
    by their number of steps, the most first.

    Returns:
        The sample numbers, a mask that is True for samples and False for padding, and the labels.
        Each has the shape (sites, steps, samples of the largest step).
    """
    most = 0
    for site in sites:
        for batch in site.batches:
            most = max(most, len(batch))
    shape = len(sites), len(sites[0].batches), most
    numbers, first = torch.zeros(shape, dtype=torch.long), 0
    real, labels = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.long)
    for row, site in enumerate(sites):
        numbers[row] = first
        padded = pad_sequence(site.batches, batch_first=True, padding_value=-1)
        part = row, slice(len(padded)), slice(padded.shape[1])
        own = padded.clamp(min=0)
        numbers[part], real[part] = own + first, padded >= 0
        labels[part] = site.training.split.labels[own]
        first += len(site.training.split)
    return numbers, real, labels
