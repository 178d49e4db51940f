"""Local training: Adam over shuffled batches, the same for every method of a comparison."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from client_app.device import Compute
from client_app.evaluation import SiteNetwork
from datasets.silos import Split
from models.errors import SiteError
from models.seeding import derive_seed, seeded
from models.settings import CommonSettings


def batches(count: int, size: int, order: torch.Generator) -> list[Tensor]:
    """Return a shuffled epoch as index tensors; a last batch of one joins the one before it.

    Batch norm has no variance over a single 1x1 map, hence the joining.
    """
    parts = list(torch.split(torch.randperm(count, generator=order), size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def train_epochs(
    network: SiteNetwork,
    split: Split,
    settings: CommonSettings,
    compute: Compute,
    key: tuple[int | str, ...],
) -> float:
    """Train ``network`` in place and return its mean loss over the last epoch.

    A fresh Adam each call: no optimiser state crosses the wire or waits at the site.

    Args:
        network: placed on the compute device.
        split: training images and labels.
        settings: local-epochs, batch-size, learning-rate and seed.
        compute: device and precision.
        key: round and site; every random number of the training is keyed on it.

    Raises:
        SiteError: the loss is not finite.
    """
    module = cast(nn.Module, network)
    module.train()
    optimiser = torch.optim.Adam(module.parameters(), lr=settings.learning_rate)
    images, labels = compute.bring(split.images), compute.bring(split.labels)
    order = torch.Generator().manual_seed(derive_seed(settings.seed, "batches", *key))
    total = torch.zeros((), device=compute.device)
    with seeded(settings.seed, "training", *key, device=compute.device):
        for _ in range(settings.local_epochs):
            total.zero_()
            for indices in batches(len(split), settings.batch_size, order):
                chosen = compute.bring(indices)
                optimiser.zero_grad(set_to_none=True)
                with compute.autocast():
                    loss = network.loss(images[chosen], labels[chosen])
                loss.backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
                optimiser.step()
                total += loss.detach() * len(indices)
    mean = total.item() / len(split)
    if not torch.isfinite(total):
        raise SiteError(f"training diverged, its loss is {mean}: lower 'learning-rate'")
    return mean
