"""Additions of a method to its training that one site or a stack of sites can compute.

A loss, a penalty or a hook that is a closure works for one site only. These classes name the
networks and tensors that they use, so simulated sites that train as one batch can put those of all
sites in their place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsilo.models.networks.site_network import TokenClassifier, cross_entropies


@dataclass(frozen=True)
class Batch:
    """A batch, and the losses that a method's own loss is made of.

    For one site the losses are means over the batch, scalars. For a stack of sites they have one
    value per sample, (batch,), because each site has a mean of its own.

    Attributes:
        inputs: (batch, *input_shape) float.
        labels: (batch,).
        loss: maps inputs and labels to the trained network's own loss.
        criterion: maps logits (batch, classes) and labels to their loss.
        mean: maps a value per sample, (batch,), to the form of the other losses.
    """

    inputs: Tensor
    labels: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    criterion: Callable[[Tensor, Tensor], Tensor]
    mean: Callable[[Tensor], Tensor]


class StackableLoss:
    """A method's own loss of a batch, which one site or a stack of sites can compute.

    ``Lab.fit`` takes it as ``objective``. Calling it with inputs (batch, *input_shape) and labels
    (batch,) returns a scalar with gradient.

    Args:
        function: maps a ``Batch``, and then each part, to the batch's loss. It treats each sample
            by itself, so it may add, scale and combine the losses of the batch, but not mix its
            rows. It must not contain random numbers other than dropout, or branch on the values of
            tensors.
        network: the trained network, the first part.
        further: what else the loss reads: networks, and modules whose buffers are constants.
            Parameters without gradient stay as they are. Other parameters are trained by the
            method's second optimiser, which must have the run's settings.

    Attributes:
        parts: ``network`` and ``further``.
    """

    def __init__(
        self, function: Callable[..., Tensor], network: TokenClassifier, *further: nn.Module
    ) -> None:
        self._function, self._network = function, network
        self.parts = nn.ModuleList([network, *further])

    def __call__(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of one site's batch, a scalar."""
        network = self._network
        batch = Batch(inputs, labels, network.loss, network.criterion, torch.mean)
        loss: Tensor = self._function(batch, *self.parts)
        return loss

    def losses(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each sample, (batch,), instead of one loss for the batch.

        ``function`` is called as for one site, but each loss in its ``Batch`` is a tensor (batch,)
        and not a mean. In a simulation, several sites may train as one batch. Each site's own mean
        can then still be computed.
        """
        each = Batch(inputs, labels, self._network.losses, cross_entropies, _keep_each)
        losses: Tensor = self._function(each, *self.parts)
        return losses


def _keep_each(losses: Tensor) -> Tensor:
    return losses


@dataclass(frozen=True)
class Term:
    """A term of the loss that depends only on a network's weights and on constants.

    ``Lab.fit`` takes it as ``penalty``.

    Attributes:
        function: maps the weights, and then each sequence of constants, to a scalar. It must not
            contain random numbers, or branch on the values of tensors.
        weights: the parameters that the term reads, by their names in the trained network.
        constants: sequences of tensors that do not change during the training, such as the weights
            at its start.
    """

    function: Callable[..., Tensor]
    weights: Mapping[str, Tensor]
    constants: tuple[Sequence[Tensor], ...]

    def __call__(self) -> Tensor:
        """Compute the term for the present weights, a scalar with gradient."""
        return self.function(list(self.weights.values()), *self.constants)


class GradientSum:
    """Adds up the gradients of all optimiser steps.

    ``Lab.fit`` takes it as ``after_step``. The gradients include those of the penalty.

    Args:
        weights: the parameters whose gradients are added up, by their names in the trained network.

    Attributes:
        weights: see above.
        sums: the sum of each parameter's gradients so far, in its shape; 0 before the first step.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)
        self.sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    def __call__(self, *_: object) -> None:
        """Add the present gradients; a parameter without a gradient adds nothing."""
        for name, parameter in self.weights.items():
            if parameter.grad is not None:
                self.sums[name] += parameter.grad
