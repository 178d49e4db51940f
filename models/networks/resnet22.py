"""ResNet-22, the feature extractor for mammograms of about 4 megapixels (Wu et al. 2019).

Names and shapes are those of the published weights: a 7x7 convolution of stride 2, a 3x3 max-pool
of stride 2, five stages of two pre-activation blocks (He et al. 2016), batch norm and ReLU. The
Fed-Align-CL paper's table IV tells other first layers than those of the weights that it loads; the
weights win here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.networks.classifier import TokenClassifier

_STAGES = 5
_HIDDEN = (128, 64)  # of the classifier, for 256 channels
SMALLEST_IMAGE = 16  # pixels of a side


class PreActivationBlock(nn.Module):
    """Batch norm, ReLU and 3x3 convolution, twice, and a shortcut; the first of a stage strides."""

    def __init__(self, before: int, after: int, *, stride: int, projects: bool) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        projection = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False))
        self.downsample = projection if projects else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, before, height, width) to (batch, after, height/stride, width/stride)."""
        active = torch.relu(self.bn1(x))
        shortcut = self.downsample(active) if self.downsample is not None else x
        body: Tensor = self.conv2(torch.relu(self.bn2(self.conv1(active))))
        return body + shortcut


class ResNet22(nn.Module):
    """Maps grey images to the mean of the last stage's maps, one embedding an image.

    Attributes:
        channels: numbers of an embedding: 16 times ``width``, 256 as published.
        checkpointed: whether a training pass keeps only the stages' inputs and computes the rest
            anew while going back, which takes less memory and more time.
    """

    def __init__(self, *, in_channels: int, width: int = 16, checkpointed: bool = False) -> None:
        super().__init__()
        self.first_conv = nn.Conv2d(in_channels, width, 7, stride=2, bias=False)
        self.first_pool = nn.MaxPool2d(3, stride=2)
        widths = [width, *(width * 2**stage for stage in range(_STAGES))]
        self.layer_list = nn.ModuleList(
            nn.Sequential(
                PreActivationBlock(before, after, stride=1 if first else 2, projects=True),
                PreActivationBlock(after, after, stride=1, projects=False),
            )
            for first, (before, after) in zip(
                [True] + [False] * (_STAGES - 1), itertools.pairwise(widths), strict=True
            )
        )
        self.final_bn = nn.BatchNorm2d(widths[-1])
        self.final_relu = nn.ReLU()  # a module, so that Grad-CAM can read the last maps
        self.channels = widths[-1]
        self.checkpointed = checkpointed

    def maps(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to the last maps (batch, channels, h, w).

        At 2048 x 2048 pixels h and w are 32.
        """
        recomputes = self.checkpointed and self.training and torch.is_grad_enabled()
        hidden = self.first_pool(self.first_conv(images))
        for stage in self.layer_list:
            for block in cast(nn.Sequential, stage):
                hidden = _checkpointed(block, hidden) if recomputes else block(hidden)
        last: Tensor = self.final_relu(self.final_bn(hidden))
        return last

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to embeddings (batch, channels, 1, 1)."""
        return self.maps(images).mean(dim=(2, 3), keepdim=True)


class RadiographClassifier(TokenClassifier):
    """A ``ResNet22`` and its head; its feature map is the one that the embedding is the mean of."""

    def encode_with_map(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``encode`` of inputs and the last feature map (batch, rows, columns, channels)."""
        maps: Tensor = cast(ResNet22, self.encoder).maps(inputs)
        return maps.mean(dim=(2, 3))[:, None], maps.permute(0, 2, 3, 1)


def _checkpointed(block: nn.Module, hidden: Tensor) -> Tensor:
    """Run ``block`` so that its inner values are computed again when going back."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), still_statistics(block)

    output: Tensor = checkpoint(block, hidden, use_reentrant=False, context_fn=contexts)
    return output


@contextmanager
def still_statistics(module: nn.Module) -> Iterator[None]:
    """Run a block in which training-mode batch norm leaves its running statistics as they are.

    A pass that is run again would otherwise count its batch twice.
    """
    norms = [m for m in module.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def build_head(channels: int, classes: int, dropout: float) -> nn.Sequential:
    """Return the classifier: two layers with batch norm, ReLU and dropout, then the logits.

    For 256 channels it is 256-128-64-classes (the paper's table IV); others in proportion.
    """
    layers: list[nn.Module] = []
    before = channels
    for wanted in _HIDDEN:
        after = max(wanted * channels // 256, 2)
        layers += [
            nn.Linear(before, after),
            nn.BatchNorm1d(after),
            nn.ReLU(),
            nn.Dropout(dropout),
        ]
        before = after
    return nn.Sequential(*layers, nn.Linear(before, classes))


def build_published_head(channels: int, classes: int) -> nn.Sequential:
    """Return the classifier of the published weights: one hidden layer with ReLU, then logits.

    Raises:
        SettingError: the data have other than two classes; the published head knows no others.
    """
    if classes != 2:
        raise SettingError(
            f"setting 'classifier' is 'published', which tells malignant from not, and the data "
            f"have {classes} classes: set it to 'seed'"
        )
    return nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, classes))


def check_image(height: int, width: int) -> None:
    """Refuse images of which nothing is left, by a ``SettingError``."""
    if min(height, width) < SMALLEST_IMAGE:
        raise SettingError(
            f"network 'resnet22' takes images of at least {SMALLEST_IMAGE} pixels a side, and "
            f"these are {height}x{width}: choose network 'conv'"
        )
