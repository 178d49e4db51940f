"""Swin Transformers for segmentation: as a pyramid for a U-Net's decoder, and as Swin-Unet.

The encoder is timm's (Liu et al. 2021); Swin-Unet (Cao et al. 2021) decodes by Swin blocks too.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fedsilo.core.errors import SettingError
from fedsilo.models.networks.segmentation.pyramids import (
    Pyramid,
    Segmenter,
    convolution,
    pixel_head,
)

# Blocks per stage of Swin-T; at 'network.width' 16 the channels are Swin-T's too
_DEPTHS = (2, 2, 6, 2)
_PATCH = 4
_LARGEST_WINDOW = 8
_BLOCKS = 2  # blocks per decoder stage of Swin-Unet, as published


def swin_encoder(*, in_channels: int, size: tuple[int, int], width: int) -> Any:
    """Build timm's Swin Transformer, which maps images to a list of maps (batch, h, w, c).

    There is a map for each stage (``swin_shape``), finest first. The first map has 1/4 of the
    image's size. Its channels are ``6 * width``, rounded down to a multiple of the attention heads.
    Each further map has half the size and twice the channels.

    Args:
        in_channels: the channels of an image.
        size: (height, width) of an image in pixels.
        width: the setting 'network.width'.

    Raises:
        SettingError: a side is below 16 pixels, or not a multiple of 8.
    """
    stages, window = swin_shape(size)
    import timm  # takes seconds

    heads = _heads(width)
    return timm.create_model(
        "swin_tiny_patch4_window7_224",
        features_only=True,
        img_size=size,
        in_chans=in_channels,
        window_size=window,
        # The channels must be a multiple of the heads, so they are rounded down to one
        embed_dim=6 * width // heads * heads,
        depths=_DEPTHS[:stages],
        num_heads=tuple(heads * 2**stage for stage in range(stages)),
        out_indices=tuple(range(stages)),
    )


def _heads(width: int) -> int:
    """Return the number of heads in the finest stage: one per 32 of its channels, but at least 1.

    The stage has 6 * ``width`` channels; the quotient is rounded down.
    """
    return max(1, 6 * width // 32)


class SwinPyramid(Pyramid):
    """A Swin Transformer with two convolutions for the scales that it lacks, 1/1 and 1/2."""

    def __init__(self, *, in_channels: int, size: tuple[int, int], width: int) -> None:
        stages, _ = swin_shape(size)
        super().__init__([width * 2**step for step in range(stages + 2)])
        swin = swin_encoder(in_channels=in_channels, size=size, width=width)
        self.swin: nn.Module = swin
        self.stem = convolution(in_channels, width)
        self.halved = convolution(width, 2 * width, stride=2)
        channels = swin.feature_info.channels()
        self.project = nn.ModuleList()
        for before, after in zip(channels, self.widths[2:], strict=True):
            self.project.append(nn.Conv2d(before, after, 1))

    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images (batch, channels, h, w) to maps (batch, c_i, h_i, w_i), finest first.

        The first map has the images' size, and each further map has half the size of the one
        before. The first two maps come from convolutions, the further maps from Swin.
        """
        fine = self.stem(images)
        maps = [fine, self.halved(fine)]
        for deep, project in zip(self.swin(images), self.project, strict=True):
            maps.append(project(deep.permute(0, 3, 1, 2)))  # channels last in Swin
        return maps


class SwinUnet(Segmenter):
    """Swin-Unet: a Swin Transformer and its mirror image, with patch expanding for merging.

    At each scale the encoder's map is concatenated to the expanded map, and a linear layer reduces
    both to the channels of the scale before two Swin blocks (figure 1 of Cao et al. 2021). Finally
    each cell of 4 x 4 pixels is expanded to its pixels.
    """

    def __init__(
        self, *, in_channels: int, size: tuple[int, int], width: int, classes: int
    ) -> None:
        super().__init__(classes)
        swin = swin_encoder(in_channels=in_channels, size=size, width=width)
        self.swin: nn.Module = swin
        channels = swin.feature_info.channels()
        self.norm = nn.LayerNorm(channels[-1])
        self.expand, self.join, self.way_up = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        # The second coarsest scale comes first. Each kind of layer has its own loop, because the
        # order of construction decides the random weights
        finer = range(len(channels) - 2, -1, -1)
        for scale in finer:
            self.expand.append(PatchExpand(channels[scale + 1], 2, channels[scale]))
        for scale in finer:
            self.join.append(nn.Linear(2 * channels[scale], channels[scale]))
        for scale in finer:
            heads = _heads(width) * 2**scale
            self.way_up.append(_swin_blocks(channels[scale], size, scale, heads))
        self.last_norm = nn.LayerNorm(channels[0])
        self.last_expand = PatchExpand(channels[0], _PATCH, channels[0])
        self.head = pixel_head(channels[0], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, channels, h, w) to pixel logits (batch, classes, h, w).

        The images are scaled by ``float_inputs`` before. The decoder starts from the encoder's
        coarsest map. At each finer scale it doubles its map's sides and concatenates the encoder's
        map of that scale. A linear layer and two Swin blocks follow. Finally each cell is expanded
        to its pixels, which a 1x1 convolution classifies.
        """
        *finer, x = self.swin(images)
        x = self.norm(x)
        ways = zip(self.expand, self.join, self.way_up, reversed(finer), strict=True)
        for expand, join, blocks, skip in ways:
            x = blocks(join(torch.cat([expand(x), skip], dim=-1)))
        pixels = self.last_expand(self.last_norm(x))
        logits: Tensor = self.head(pixels.permute(0, 3, 1, 2))
        return logits

    def coarsest(self, images: Tensor) -> Tensor:
        """Map images to the encoder's last map, normalised, (batch, c, rows, columns)."""
        last: Tensor = self.norm(self.swin(images)[-1])
        return last.permute(0, 3, 1, 2)


class PatchExpand(nn.Module):
    """Patch expanding (Cao et al. 2021, section 3.5): a cell becomes ``factor`` by ``factor``.

    A linear layer computes the channels of all new cells, which are then rearranged and normalised.
    """

    def __init__(self, before: int, factor: int, after: int) -> None:
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(before, factor * factor * after, bias=False)
        self.norm = nn.LayerNorm(after)

    def forward(self, x: Tensor) -> Tensor:
        """Enlarge maps (batch, h, w, before) to (batch, factor * h, factor * w, after).

        A linear layer turns each cell into ``factor`` by ``factor`` cells, and a layer norm
        follows.
        """
        batch, rows, columns, _ = x.shape
        # (batch, row, column, row in cell, column in cell): the two middle axes are swapped, so
        # a cell's rows follow each other; without that the image would be shuffled
        cells = self.linear(x).reshape(batch, rows, columns, self.factor, self.factor, -1)
        sides = (rows * self.factor, columns * self.factor)
        expanded: Tensor = self.norm(cells.transpose(2, 3).reshape(batch, *sides, -1))
        return expanded


def _swin_blocks(channels: int, size: tuple[int, int], stage: int, heads: int) -> nn.Module:
    """Build a stage of Swin-Unet's decoder: two of timm's Swin Transformer blocks.

    The stage maps (batch, rows, columns, channels) to the same shape. It has the grid and the
    attention windows of the encoder's stage of the same index.

    Args:
        channels: the channels of the maps.
        size: (height, width) of the image in pixels.
        stage: the index of the stage. 0 is the finest, with 4 x 4 pixels for each place, and each
            further stage doubles the sides.
        heads: the number of attention heads.
    """
    from timm.models.swin_transformer import SwinTransformerStage

    cell = _PATCH * 2**stage  # the pixels of a cell's side
    return SwinTransformerStage(
        dim=channels,
        out_dim=channels,
        input_resolution=(size[0] // cell, size[1] // cell),
        depth=_BLOCKS,
        downsample=False,
        num_heads=heads,
        window_size=swin_shape(size)[1],
    )


def swin_shape(size: tuple[int, int]) -> tuple[int, int]:
    """Choose the number of stages and the window of a Swin Transformer for images of ``size``.

    The first stage has a grid of 4-pixel patches, and each further stage halves the grid. A stage
    is added if its grid has whole sides of at least 4 cells, up to four stages. The attention
    window is the largest number up to 8 that divides the sides of the last grid.

    Returns:
        The number of stages (1 to 4) and the side of the window in cells (1 to 8).

    Raises:
        SettingError: a side is below 16 pixels, or not a multiple of 8.
    """
    # All sides are multiples of a number exactly if their greatest common divisor is
    common = math.gcd(*size)
    if common % (2 * _PATCH) or min(size) < 4 * _PATCH:
        raise SettingError(
            "Swin Transformers take images whose sides are multiples of 8 and at least 16, but "
            f"these are {size[0]}x{size[1]}: set 'data.image-size', or choose another network"
        )
    cells, shortest = common // _PATCH, min(size) // _PATCH
    stages = 1
    while stages < len(_DEPTHS) and cells % 2 == 0 and shortest >= 8:
        cells, shortest = cells // 2, shortest // 2
        stages += 1
    window = _LARGEST_WINDOW
    while cells % window:
        window -= 1
    return stages, window
