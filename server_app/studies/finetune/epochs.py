"""Epochs of training images under a cosine learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.loop import LocalTraining, Objective, open_optimiser, train_locally
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
    """Train ``network`` in place and yield the mean loss of each epoch.

    The learning rate falls from the settings' to 0 over ``epochs``. ``purpose`` keys the order of
    the batches, which differs from that of other trainings with the same seed.
    """
    optimiser = open_optimiser(network, settings)
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda epoch: 0.5 * (1 + math.cos(math.pi / epochs * epoch))
    )
    for epoch in range(epochs):
        yield train_locally(
            LocalTraining(
                cast(SiteNetwork, network),  # beside the objective only its parameters are used
                split,
                settings,
                compute,
                (purpose, epoch),
                objective=objective,
                optimiser=optimiser,
            )
        )
        cosine.step()
