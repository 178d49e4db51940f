"""Predictive entropy by Monte Carlo dropout (UEFL, eq. 8; Gal and Ghahramani 2016)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy in nats of class probabilities: (..., classes) to (...)."""
    entropy: Tensor = torch.special.entr(probabilities).sum(dim=-1)
    return entropy


@contextmanager
def only_dropout_active(module: nn.Module, dropout: bool = True) -> Iterator[None]:
    """Put ``module`` in eval mode but for its dropout layers, then restore every mode.

    Batch norm must not see single test batches, so ``module.train()`` would be wrong; plain
    ``module.eval()`` makes all passes identical. With ``dropout`` false its layers rest too.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    for part in module.modules():
        if isinstance(part, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            part.training = dropout
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


class Classifier(Protocol):
    """A network whose dropout sits between its features and its logits."""

    def classify(self, features: Tensor) -> Tensor:
        """Map features (batch, ...) to logits (batch, classes)."""
        ...


def mc_dropout_probabilities(network: Classifier, features: Tensor, passes: int) -> Tensor:
    """Return the mean softmax over ``passes`` dropout draws: (batch, classes), float64.

    Everything before ``features`` is free of dropout, so only ``classify`` runs anew each pass.
    Draws come from torch's global generator (see ``models.contract.seeding.seeded``); the caller
    has put the network in ``only_dropout_active``.
    """
    total = torch.softmax(network.classify(features).float(), dim=-1).double()
    for _ in range(passes - 1):
        total += torch.softmax(network.classify(features).float(), dim=-1).double()
    return total / passes
