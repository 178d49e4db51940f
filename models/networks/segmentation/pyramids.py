"""Encoders for segmentation, which map images to feature maps at several scales.

``ConvPyramid`` is the convolutional encoder of ``models.networks.encoders``, ``ViTPyramid`` a
prompted ViT whose layers serve as scales (Hatamizadeh et al. 2022, UNETR), ``TransPyramid`` a ViT
on the maps of a convolutional encoder (Chen et al. 2021, TransUNet).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedsilo.core.errors import SettingError
from fedsilo.models.networks.encoders import ConvEncoder, ResidualBlock

if TYPE_CHECKING:
    from fedsilo.models.networks.prompted_vit import PromptedViT

_CONV_WIDTHS = (1, 2, 4)  # channels of ConvEncoder's stages, in multiples of its width
# A class's logits begin this far below those of the background, which is a share of about 2 %. With
# even odds a network spends its first epochs learning that most pixels are background (Lin et al.
# 2017, RetinaNet's prior)
_RARE = 4.0


class Segmenter(nn.Module):
    """A network that classifies each pixel.

    Attributes:
        classes: the number of classes; the first class is the background.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Map scaled images (batch, channels, h, w) to pixel logits (batch, classes, h, w)."""

    @abstractmethod
    def coarsest(self, images: Tensor) -> Tensor:
        """Map images to the encoder's last map (batch, c, rows, columns)."""

    def trunk(self) -> nn.Module | None:
        """Return the part that can load the weights of a trained run; by default None."""
        return None


class Pyramid(nn.Module):
    """An encoder of several scales.

    Attributes:
        widths: channels of each map, from the finest, which has the image's size, to the coarsest.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.widths = tuple(widths)

    @abstractmethod
    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images (batch, channels, h, w) to maps (batch, widths[i], h_i, w_i), finest first."""


class ConvPyramid(Pyramid):
    """``ConvEncoder`` as a pyramid: maps before each max-pool (1/1, 1/2, 1/4) and the last map."""

    def __init__(self, *, in_channels: int, width: int) -> None:
        super().__init__((width, 2 * width, 4 * width, 4 * width))
        self.encoder = ConvEncoder(in_channels=in_channels, width=width)
        self.bottom = ResidualBlock(4 * width)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images to maps at 1/1, 1/2, 1/4 and 1/8 of the image's size."""
        maps, last = _before_pools(self.encoder.stages, images)
        return [*maps, self.bottom(last)]


class ViTPyramid(Pyramid):
    """A ViT as a pyramid: deeper layers give coarser maps.

    The finest map is a convolution of the image. A patch of p pixels gives round(log2 p) further
    scales; the coarsest is the grid of patches with the tokens of the last layer. Tokens of earlier
    layers are enlarged to their scale.
    """

    def __init__(self, network: PromptedViT, *, in_channels: int, width: int) -> None:
        patch = max(network.vit.patch_embed.patch_size)
        steps = max(1, round(math.log2(patch)))
        super().__init__([width * 2**step for step in range(steps + 1)])
        self.network = network
        depth, channels = len(network.vit.blocks), network.vit.embed_dim
        # Entry i of ``encode_with_layers`` is the input of block i, which block i - 1 returned.
        # Entry 0 is only the embedding, and the last one is the output: both are left out
        self.layers: list[int] = []
        for step in range(1, steps):
            layer = depth * step // steps
            self.layers.append(min(max(1, layer), depth - 1))
        self.stem = convolution(in_channels, width)
        self.project = nn.ModuleList(nn.Conv2d(channels, w, 1) for w in self.widths[1:])

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images (batch, channels, h, w) to maps (batch, widths[i], h_i, w_i), finest first.

        - The first map is a convolution of the image, and has the image's size.
        - Each middle map comes from a layer of the ViT, deeper from map to map. It has half the
          size of the map before it, rounded up.
        - The last map comes from the ViT's last layer and has one place for each patch.
        """
        tokens = self.network.encode_with_layers(images)
        maps = [self.stem(images)]
        rows, columns = images.shape[-2:]
        for layer, project in zip([*self.layers, -1], self.project, strict=True):
            x = project(tokens[layer].permute(0, 3, 1, 2))
            if layer != -1:
                # Rounded up: the pooled maps of an odd side would not fit otherwise
                rows, columns = (rows + 1) // 2, (columns + 1) // 2
                x = resize_maps(x, (rows, columns))
            maps.append(x)
        return maps


class TransPyramid(Pyramid):
    """TransUNet's encoder: a ViT on the maps of a convolutional encoder, which gives finer maps.

    The paper puts a ViT of 16 pixels per patch on ResNet-50's maps at 1/16. Here a ViT of 2^s
    pixels per patch reads ``ConvEncoder``'s maps at 1/2^s. ``ConvEncoder`` halves three times only,
    so a strided convolution does the further halvings. The ViT loses its embedding of images
    and keeps all other parts.
    """

    def __init__(self, network: PromptedViT, *, in_channels: int, width: int) -> None:
        vit = network.vit
        steps = _halvings(max(vit.patch_embed.patch_size))
        encoder = ConvEncoder(in_channels=in_channels, width=width)
        kept = min(steps, len(_CONV_WIDTHS))
        # The input of each max-pool is a map. The output of the last one is a map too if a strided
        # convolution follows, because it is then finer than the ViT's grid
        factors = list(_CONV_WIDTHS[:kept])
        if steps > kept:
            factors.append(_CONV_WIDTHS[-1])
        super().__init__([width * factor for factor in [*factors, 4]])
        pools = []
        for place, layer in enumerate(encoder.stages):
            if isinstance(layer, nn.MaxPool2d):
                pools.append(place)
        self.stages = encoder.stages[: pools[kept - 1] + 1]
        step, channels = 2 ** (steps - kept), _CONV_WIDTHS[kept - 1] * width
        self.embed = nn.Conv2d(channels, vit.embed_dim, step, stride=step)
        vit.patch_embed.proj = nn.Identity()
        self.network = network
        self.project = nn.Conv2d(vit.embed_dim, self.widths[-1], 1)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images (batch, channels, h, w) to maps, finest first, each half as large as the last.

        The first map has the images' size. All maps but the last one are convolutional. The last
        map is the ViT's, with one place for each patch.
        """
        maps, last = _before_pools(self.stages, images)
        if len(maps) + 1 < len(self.widths):
            maps.append(last)
        tokens = self.network.encode_patches(self.embed(last).flatten(2).transpose(1, 2))
        return [*maps, self.project(tokens.permute(0, 3, 1, 2))]


def _before_pools(stages: nn.Sequential, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Run the layers on ``x`` in turn, and keep the maps before they are pooled.

    Returns:
        The input of each max-pool, in order, and the final output.
    """
    maps = []
    for layer in stages:
        if isinstance(layer, nn.MaxPool2d):
            maps.append(x)
        x = layer(x)
    return maps, x


def _halvings(patch: int) -> int:
    """Count how often images are halved until a ViT's patch becomes one place of the map.

    Args:
        patch: the patch's side in pixels.

    Raises:
        SettingError: the side is not a power of two, or is 1.
    """
    steps = patch.bit_length() - 1
    if patch != 2**steps or steps == 0:
        raise SettingError(
            f"network 'transunet' halves images until a patch is one cell, but the ViT's patches "
            f"have {patch} pixels: set 'vit.backbone-patch' to 8 or 16, or choose another network"
        )
    return steps


def convolution(before: int, after: int, *, stride: int = 1) -> nn.Sequential:
    """Build a 3x3 convolution from ``before`` to ``after`` channels, with batch norm and ReLU.

    At stride 1 the maps keep their size. At stride 2 the maps are halved, with odd sides rounded
    up.
    """
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )


def resize_maps(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Resize maps (batch, c, h, w) bilinearly to ``size`` (height, width), if it differs."""
    if tuple(maps.shape[-2:]) == tuple(size):
        return maps
    return nn.functional.interpolate(maps, tuple(size), mode="bilinear", align_corners=False)


def pixel_head(channels: int, classes: int) -> nn.Conv2d:
    """Build the last layer, a 1x1 convolution that turns feature maps into logits of each pixel.

    At first the network predicts background almost everywhere, because the initial bias is 0 for
    the background (class 0) and -4 for each other class.
    """
    head = nn.Conv2d(channels, classes, 1)
    head.bias = nn.Parameter(torch.tensor([0.0] + [-_RARE] * (classes - 1)))
    return head
