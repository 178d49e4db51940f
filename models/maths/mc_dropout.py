"""Predictive entropy by Monte Carlo dropout (UEFL, eq. 8; Gal and Ghahramani 2016)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy in nats of class probabilities, (..., classes) to (...)."""
    entropy: Tensor = torch.special.entr(probabilities).sum(dim=-1)
    return entropy


@contextmanager
def only_dropout_active(module: nn.Module, dropout: bool = True) -> Iterator[None]:
    """Put ``module`` in eval mode except its dropout layers, and restore every mode at the end.

    With ``dropout`` false its dropout layers are in eval mode too, as are those with the attribute
    ``only_trains``.
    """
    # module.train() would also let batch norm learn from test batches, and with module.eval() all
    # passes would be identical, as they are in UEFL's published code
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    for part in module.modules():
        if isinstance(part, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            part.training = dropout and not hasattr(part, "only_trains")
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def mc_dropout_probabilities(
    classify: Callable[[Tensor], Tensor], features: Tensor, passes: int
) -> Tensor:
    """Return the mean softmax over ``passes`` samples of dropout: (batch, classes), float64.

    ``classify`` maps a network's features (batch, ...) to logits (batch, classes), and all dropout
    is in it. The caller has put the network in ``only_dropout_active``, and torch's global
    generator, the only one that dropout reads, under ``models.contract.seeding.seed_generators``.
    """
    total = torch.softmax(classify(features).float(), dim=-1).double()
    for _ in range(passes - 1):
        total += torch.softmax(classify(features).float(), dim=-1).double()
    return total / passes
