"""Measuring a model on a split: accuracy, loss and MC-dropout entropy in one pass."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor, nn

from client_app.device import Compute
from datasets.silos import Split
from models.seeding import seeded
from models.settings import CommonSettings
from models.uncertainty import mc_dropout_probabilities, only_dropout_active, predictive_entropy

_BATCH = 500


class SiteNetwork(Protocol):
    """What a site trains and measures; an ``nn.Module`` in three steps and a loss."""

    def encode(self, images: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to tokens (batch, l, c)."""
        ...

    def discretise(self, tokens: Tensor) -> Tensor:
        """Map tokens to what the classifier reads."""
        ...

    def classify(self, features: Tensor) -> Tensor:
        """Map features to logits (batch, classes); all dropout is here."""
        ...

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the training loss of a batch."""
        ...


class TokenWatch(Protocol):
    """What a method measures of the tokens beside accuracy, loss and entropy."""

    def see(self, tokens: Tensor) -> None:
        """Take note of a batch of tokens (batch, l, c)."""
        ...

    def values(self) -> dict[str, float]:
        """Return the measurements by name."""
        ...


def measure(
    network: SiteNetwork,
    split: Split,
    settings: CommonSettings,
    compute: Compute,
    key: tuple[int | str, ...],
    watch: TokenWatch | None = None,
) -> dict[str, float]:
    """Return ``accuracy``, ``loss`` and ``entropy`` of the mean over MC-dropout passes.

    Accuracy is of the mean softmax's largest class, loss its negative log-likelihood in nats,
    entropy UEFL's eq. 8 in nats, all averaged over the split's samples. ``watch`` sees the tokens
    of every batch and adds its own values.
    """
    right, loss, entropy = 0, 0.0, 0.0
    module = cast(nn.Module, network)
    with (
        seeded(settings.seed, "mc-dropout", *key, device=compute.device),
        torch.no_grad(),
        only_dropout_active(module),
        compute.autocast(),
    ):
        for images, labels in zip(
            torch.split(split.images, _BATCH), torch.split(split.labels, _BATCH), strict=True
        ):
            tokens = network.encode(compute.bring(images))
            if watch:
                watch.see(tokens)
            features = network.discretise(tokens)
            mean = mc_dropout_probabilities(network, features, settings.mc_passes).cpu()
            right += int((mean.argmax(dim=1) == labels).sum())
            loss += float(
                nn.functional.nll_loss(mean.clamp_min(1e-12).log(), labels, reduction="sum")
            )
            entropy += float(predictive_entropy(mean).sum())
    count = len(split)
    values = {"accuracy": right / count, "loss": loss / count, "entropy": entropy / count}
    return values | (watch.values() if watch else {})


def tokens_of(network: SiteNetwork, split: Split, compute: Compute) -> Tensor:
    """Return the tokens (n, l, c) of a whole split, in eval mode, float32 on the CPU."""
    module = cast(nn.Module, network)
    module.eval()
    with torch.no_grad(), compute.autocast():
        parts = [
            network.encode(compute.bring(images)).float().cpu()
            for images in torch.split(split.images, _BATCH)
        ]
    return torch.cat(parts)
