"""Predictive entropy by Monte Carlo dropout (UEFL, eq. 8; Gal and Ghahramani 2016)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """Compute the entropy of class probabilities in nats, (..., classes) to (...)."""
    entropy: Tensor = torch.special.entr(probabilities).sum(dim=-1)
    return entropy


@contextmanager
def only_dropout_active(module: nn.Module, dropout: bool = True) -> Iterator[None]:
    """Put ``module`` in eval mode inside a ``with`` block, but keep its dropout layers active.

    Active dropout makes predictions vary. Dropout layers are switched off too if ``dropout`` is
    False. A layer with the attribute ``only_trains`` is always off. At the end of the block, every
    layer gets its old mode back.
    """
    # module.train() would let batch norm learn from test batches. With only module.eval(), all
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


def mc_dropout_mean(
    classify: Callable[[Tensor], Tensor],
    features: Tensor,
    passes: int,
    predict: Callable[[Tensor], Tensor],
) -> Tensor:
    """Average predictions over ``passes`` passes with random dropout, (batch, ...) float64.

    Call it inside ``only_dropout_active``, which switches dropout on. To get repeatable dropout
    masks, call it also inside ``fedsilo.core.seeding.seed_generators``.

    Args:
        classify: maps features to the network's outputs, (batch, ...). All dropout layers must be
            in this part of the network.
        features: (batch, ...).
        passes: the number of passes, at least 1.
        predict: maps outputs to predictions (``Task.predict``), such as class probabilities.
    """
    total = predict(classify(features).float()).double()
    for _ in range(passes - 1):
        total += predict(classify(features).float()).double()
    return total / passes
