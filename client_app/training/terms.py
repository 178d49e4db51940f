"""Additions of a method to its training that one site or a stack of sites can compute.

A penalty or a hook that is a closure works for one site only. These classes name the tensors that
they use, so simulated sites that train as one batch can put all sites' tensors in their place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
