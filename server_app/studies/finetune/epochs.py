"""Passes over training images by an optimiser on a cosine, one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.loop import Objective, open_optimiser, train_locally
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.site_network import SiteNetwork


def cosine_epochs(
    network: nn.Module,
    objective: Objective,
    split: Split,
    settings: CommonSettings,
    compute: Compute,
    *,
    epochs: int,
    purpose: str,
) -> Iterator[float]:
    """Train ``network`` in place, an epoch at a time, and yield each one's mean loss.

    Args:
        network: whose parameters are trained.
        objective: the loss of a batch.
        split: the images.
        settings: optimiser, learning rate at the start, batches, seed.
        compute: where.
        epochs: how many; the learning rate falls to 0 over them.
        purpose: tells the batches' order from that of other trainings of the seed.
    """
    optimiser = open_optimiser(network, settings)
    half = math.pi / epochs
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda epoch: 0.5 * (1 + math.cos(half * epoch))
    )
    for epoch in range(epochs):
        yield train_locally(
            cast(SiteNetwork, network),  # beside the objective only its parameters are used
            split,
            settings,
            compute,
            (purpose, epoch),
            objective=objective,
            optimiser=optimiser,
        )
        cosine.step()
