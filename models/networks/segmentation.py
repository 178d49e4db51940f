"""Segmentation: an encoder's maps at several scales, a U-Net's way back up, and the loss.

Four encoders, one decoder (Ronneberger et al. 2015, U-Net): ``unet``, ``vit``, ``swin`` and
``transunet`` (``models.networks.pyramids``), the FedEFM paper's backbones; ``swinunet`` has a way
up of its own (``models.networks.swin``). The loss is cross-entropy plus soft Dice (Milletari et al.
2016).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.seeding import seeded
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.pyramids import (
    ConvPyramid,
    Pyramid,
    Segmenter,
    TransPyramid,
    ViTPyramid,
    convolution,
    pixel_head,
    resized,
)
from fedsilo.models.networks.swin import SwinPyramid, SwinUnet

NETWORKS = ("unet", "vit", "swin", "transunet", "swinunet")


class PyramidNetwork(Segmenter):
    """A pyramid and a U-Net's way back up: enlarge, join the finer map, convolve twice."""

    def __init__(self, pyramid: Pyramid, classes: int) -> None:
        super().__init__(classes)
        self.pyramid = pyramid
        self.decoder = nn.ModuleList(
            nn.Sequential(convolution(fine + coarse, fine), convolution(fine, fine))
            for fine, coarse in itertools.pairwise(pyramid.widths)
        )
        self.head = pixel_head(pyramid.widths[0], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, channels, h, w), scaled, to logits (batch, classes, h, w)."""
        *finer, x = self.pyramid(images)
        for skip, block in zip(reversed(finer), reversed(self.decoder), strict=True):
            x = block(torch.cat([resized(x, skip.shape[-2:]), skip], dim=1))
        logits: Tensor = self.head(x)
        return logits

    def coarsest(self, images: Tensor) -> Tensor:
        """Return the pyramid's last map."""
        last: Tensor = self.pyramid(images)[-1]
        return last

    def trunk(self) -> nn.Module | None:
        """Return the pyramid's."""
        return self.pyramid.trunk()


def build_segmentation(kind: str, settings: CommonSettings, task: Task) -> Segmenter:
    """Build the network ``kind`` for images of ``task``, with random weights keyed on the seed.

    Of a ``vit`` and a ``transunet`` all is trained, backbone and prompts; ``settings`` say its
    size.

    Raises:
        SettingError: images do not fit the network.
    """
    channels, height, width = task.input_shape
    with seeded(settings.seed, "initial-weights"):
        if kind == "swinunet":
            size = (height, width)
            return SwinUnet(
                in_channels=channels, size=size, width=settings.width, classes=task.classes
            )
        return PyramidNetwork(_pyramid(kind, settings, task), task.classes)


def _pyramid(kind: str, settings: CommonSettings, task: Task) -> Pyramid:
    channels, height, width = task.input_shape
    if kind == "swin":
        return SwinPyramid(in_channels=channels, size=(height, width), width=settings.width)
    if kind == "unet":
        _refuse_small(height, width)
        return ConvPyramid(in_channels=channels, width=settings.width)
    from fedsilo.models.networks.prompted_vit import PromptedViT, build_vit  # imports timm, seconds

    vit = PromptedViT(build_vit(settings, task), task, settings)
    kept = ViTPyramid if kind == "vit" else TransPyramid
    return kept(vit, in_channels=channels, width=settings.width)


def _refuse_small(height: int, width: int) -> None:
    if min(height, width) < 8:
        raise SettingError(
            f"network 'unet' divides images by 8, which leaves nothing of {height}x{width} pixels: "
            "set 'image-size'"
        )


def segmentation_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Return mean cross-entropy plus soft Dice loss.

    Args:
        logits: (batch, classes, h, w).
        masks: (batch, h, w), the classes' numbers, 0 the background.

    The second is 1 - (2 sum p t + 1) / (sum p + sum t + 1), sums over all pixels of the batch,
    mean over the classes but the background: of a thin catheter cross-entropy alone is happy with
    nothing but background.
    """
    truth = masks.long()
    entropy = nn.functional.cross_entropy(logits.float(), truth)
    shares = logits.float().softmax(dim=1)[:, 1:]
    wanted = nn.functional.one_hot(truth, logits.shape[1]).permute(0, 3, 1, 2)[:, 1:]
    both = (shares * wanted).sum(dim=(0, 2, 3))
    sizes = shares.sum(dim=(0, 2, 3)) + wanted.sum(dim=(0, 2, 3))
    return entropy + (1 - (2 * both + 1) / (sizes + 1)).mean()
