"""Segmentation: an encoder's maps at several scales, a U-Net's way back up, and the loss.

Three encoders, one decoder (Ronneberger et al. 2015, U-Net): ``unet``, the convolutional encoder of
``models.networks.encoders``; ``vit``, a prompted ViT whose layers stand for scales (Hatamizadeh
et al. 2022, UNETR); ``swin``, a Swin Transformer of timm (Liu et al. 2021), as of the FedEFM
paper's backbones. The loss is cross-entropy plus soft Dice (Milletari et al. 2016).
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from models.contract.errors import SettingError
from models.contract.seeding import seeded
from models.contract.settings import CommonSettings
from models.networks.encoders import ConvEncoder, ResidualBlock
from models.networks.kinds import Task

if TYPE_CHECKING:
    from models.networks.prompted_vit import PromptedViT

NETWORKS = ("unet", "vit", "swin")
_SWIN_DEPTHS = (2, 2, 6, 2)  # of Swin-T; with 'width' 16 its channels are Swin-T's too
_SWIN_PATCH = 4
_LARGEST_WINDOW = 8
_RARE = 4.0  # by so much a class's first logits lie below the background's: a share of about 2 %


class Pyramid(nn.Module):
    """Makes maps of images at several scales.

    Attributes:
        widths: channels of each map, from the finest, of the image's size, to the coarsest.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.widths = tuple(widths)

    @abstractmethod
    def forward(self, images: Tensor) -> list[Tensor]:
        """Map images (batch, channels, h, w) to maps (batch, widths[i], h_i, w_i), finest first."""

    def trunk(self) -> nn.Module | None:
        """Return the part whose arrays are named as those of a run's network; None: it has none."""
        return None


class ConvPyramid(Pyramid):
    """``ConvEncoder``: its features before each max-pool, and those after the last."""

    def __init__(self, *, in_channels: int, width: int) -> None:
        super().__init__((width, 2 * width, 4 * width, 4 * width))
        self.encoder = ConvEncoder(in_channels=in_channels, width=width)
        self.bottom = ResidualBlock(4 * width)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return maps of 1/1, 1/2, 1/4 and 1/8 of the image's size."""
        maps, x = [], images
        for layer in self.encoder.stages:
            if isinstance(layer, nn.MaxPool2d):
                maps.append(x)
            x = layer(x)
        return [*maps, self.bottom(x)]

    def trunk(self) -> nn.Module:
        """Return the encoder under its name in a run's network."""
        return nn.ModuleDict({"encoder": self.encoder})


class ViTPyramid(Pyramid):
    """A ViT: the image itself, then patch tokens of ever deeper layers, enlarged the less.

    A patch of p pixels gives round(log2 p) scales below the image's own; the coarsest is the grid
    of patches with the last layer's tokens.
    """

    def __init__(self, network: PromptedViT, *, in_channels: int, width: int) -> None:
        patch = max(network.vit.patch_embed.patch_size)
        steps = max(1, round(math.log2(patch)))
        super().__init__([width * 2**step for step in range(steps + 1)])
        self.network = network
        depth, channels = len(network.vit.blocks), network.vit.embed_dim
        # The token that enters block i is the one that block i - 1 has made
        self.layers = [max(1, depth * step // steps) for step in range(1, steps)]
        self.layers = [min(layer, depth - 1) for layer in self.layers]
        self.stem = convolution(in_channels, width)
        self.project = nn.ModuleList(nn.Conv2d(channels, w, 1) for w in self.widths[1:])

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return maps of 1/1, 1/2, ... of the image's size, the last of one cell a patch."""
        tokens, last = self._tokens(images)
        deep = [tokens[layer] for layer in self.layers] + [last]
        maps = [self.stem(images)]
        for step, (entering, project) in enumerate(zip(deep, self.project, strict=True), start=1):
            x = project(entering.permute(0, 3, 1, 2))
            if step <= len(self.layers):
                x = resized(x, tuple(-(-side // 2**step) for side in images.shape[-2:]))
            maps.append(x)
        return maps

    def trunk(self) -> nn.Module:
        """Return the ViT as a run's network."""
        return self.network

    def _tokens(self, images: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        """Return patch tokens (batch, rows, columns, c) that enter each layer, and the last ones.

        The network calls the parts of its blocks, not the blocks: hence a hook of what enters
        their first part.
        """
        tokens: dict[int, Tensor] = {}
        grid, prefix = self.network.grid_size(), self.network.vit.num_prefix_tokens

        def keeper(layer: int) -> Any:
            def keep(module: nn.Module, entering: tuple[Tensor, ...]) -> None:
                patches = entering[0][:, prefix:]
                tokens[layer] = patches.reshape(len(patches), *grid, -1)

            return keep

        blocks = self.network.vit.blocks
        hooks = [
            blocks[layer].norm1.register_forward_pre_hook(keeper(layer))
            for layer in set(self.layers)
        ]
        try:
            _, last = self.network.encode_with_map(images)
        finally:
            for hook in hooks:
                hook.remove()
        return tokens, last


class SwinPyramid(Pyramid):
    """A Swin Transformer of timm below two convolutions at the image's and half its size."""

    def __init__(self, *, in_channels: int, size: tuple[int, int], width: int) -> None:
        stages, window = swin_shape(size)
        super().__init__([width * 2**step for step in range(stages + 2)])
        import timm

        heads = max(1, 6 * width // 32)
        swin: Any = timm.create_model(
            "swin_tiny_patch4_window7_224",
            features_only=True,
            img_size=size,
            in_chans=in_channels,
            window_size=window,
            embed_dim=6 * width // heads * heads,
            depths=_SWIN_DEPTHS[:stages],
            num_heads=tuple(heads * 2**stage for stage in range(stages)),
            out_indices=tuple(range(stages)),
        )
        self.swin: nn.Module = swin
        self.stem = convolution(in_channels, width)
        self.halved = convolution(width, 2 * width, stride=2)
        channels = swin.feature_info.channels()
        pairs = zip(channels, self.widths[2:], strict=True)
        self.project = nn.ModuleList(nn.Conv2d(before, after, 1) for before, after in pairs)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return maps of 1/1, 1/2, 1/4, ... of the image's size."""
        fine = self.stem(images)
        deep = zip(self.swin(images), self.project, strict=True)
        return [fine, self.halved(fine), *(project(x.permute(0, 3, 1, 2)) for x, project in deep)]


class SegmentationNetwork(nn.Module):
    """A pyramid and the way back up: enlarge, join the finer map, convolve twice.

    It begins by calling almost all background, as it is (Lin et al. 2017, RetinaNet's prior).
    """

    def __init__(self, pyramid: Pyramid, classes: int) -> None:
        super().__init__()
        self.pyramid = pyramid
        self.classes = classes
        self.decoder = nn.ModuleList(
            nn.Sequential(convolution(fine + coarse, fine), convolution(fine, fine))
            for fine, coarse in itertools.pairwise(pyramid.widths)
        )
        self.head = nn.Conv2d(pyramid.widths[0], classes, 1)
        rare = torch.zeros(classes).index_fill(0, torch.arange(1, classes), -_RARE)
        self.head.bias = nn.Parameter(rare)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, channels, h, w), scaled, to logits (batch, classes, h, w)."""
        *finer, x = self.pyramid(images)
        for skip, block in zip(reversed(finer), reversed(self.decoder), strict=True):
            x = block(torch.cat([resized(x, skip.shape[-2:]), skip], dim=1))
        logits: Tensor = self.head(x)
        return logits


def convolution(before: int, after: int, *, stride: int = 1) -> nn.Sequential:
    """Return a 3x3 convolution with batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )


def resized(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Return maps (batch, c, ., .) at ``size``, bilinearly."""
    if tuple(maps.shape[-2:]) == tuple(size):
        return maps
    return nn.functional.interpolate(maps, tuple(size), mode="bilinear", align_corners=False)


def swin_shape(size: tuple[int, int]) -> tuple[int, int]:
    """Return how many stages a Swin Transformer has on images of ``size``, and its window.

    Patches are of 4 pixels and each stage halves their grid, at most to 4 a side; the window is
    the largest up to 8 that divides the last grid, and so all. 224 pixels give four stages and 7,
    as published, 64 pixels three stages and 4.

    Raises:
        SettingError: the image is too small or its sides are no multiples of 8.
    """
    sides = [side // _SWIN_PATCH for side in size]
    if any(side % (2 * _SWIN_PATCH) for side in size) or min(sides) < 4:
        raise SettingError(
            f"network 'swin' takes images whose sides are multiples of 8 and at least 16, and "
            f"these are {size[0]}x{size[1]}: set 'image-size', or choose another network"
        )
    # Halved while both sides can be, and while 4 cells a side are left
    stages = 1
    while stages < len(_SWIN_DEPTHS) and all(s % 2 == 0 and s >= 8 for s in sides):
        sides = [side // 2 for side in sides]
        stages += 1
    common = math.gcd(*sides)
    return stages, max(w for w in range(1, _LARGEST_WINDOW + 1) if common % w == 0)


def build_segmentation(kind: str, settings: CommonSettings, task: Task) -> SegmentationNetwork:
    """Build the network ``kind`` for images of ``task``, with random weights keyed on the seed.

    Of a ``vit`` all is trained, backbone and prompts; ``settings`` say its size.

    Raises:
        SettingError: images do not fit the network.
    """
    channels, height, width = task.input_shape
    with seeded(settings.seed, "initial-weights"):
        if kind == "swin":
            pyramid: Pyramid = SwinPyramid(
                in_channels=channels, size=(height, width), width=settings.width
            )
        elif kind == "vit":
            from models.networks.prompted_vit import PromptedViT, build_vit  # imports timm, seconds

            vit = PromptedViT(build_vit(settings, task), task, settings)
            pyramid = ViTPyramid(vit, in_channels=channels, width=settings.width)
        else:
            _refuse_small(height, width)
            pyramid = ConvPyramid(in_channels=channels, width=settings.width)
        return SegmentationNetwork(pyramid, task.classes)


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
