"""Encoders of images and rows, from inputs to maps (batch, channels, rows, columns).

The grey-scale encoder is the UEFL paper's (section 4, "a convolutional network comprising three
ResNet blocks"), the one in colour VGG16's features with batch norm (timm). At width w both end in
4w channels, 512 at the paper's 128. Rows of a table are one place.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

VGG_WIDTH = 128  # at which VGG16 is as published


def float_inputs(inputs: Tensor) -> Tensor:
    """Return inputs (batch, ...) as networks take them.

    8-bit images are scaled to -1..1; int16 ones, radiographs of any depth less 32768, are
    standardised each by its own mean and standard deviation; others stay as they are.
    """
    if inputs.dtype == torch.uint8:
        return inputs.float() / 127.5 - 1
    if inputs.dtype == torch.int16:
        pixels = inputs.float()
        axes = tuple(range(1, inputs.ndim))
        spread, mean = torch.std_mean(pixels, dim=axes, keepdim=True, correction=0)
        return (pixels - mean) / spread.clamp_min(1e-5)
    return inputs


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm and an identity shortcut; shape is kept."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to the same shape."""
        return torch.relu(x + self.body(x))


class ConvEncoder(nn.Module):
    """Three stages of conv 3x3, residual block and 2x2 max-pool, widths w, 2w and 4w.

    With ``leading_norm`` batch norm and ReLU follow a stage's first convolution; the paper's
    authors have none there.
    """

    def __init__(self, *, in_channels: int, width: int, leading_norm: bool = True) -> None:
        super().__init__()
        widths = [in_channels, width, 2 * width, 4 * width]
        stages: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            # What batch norm subtracts a bias would only add
            stages += [nn.Conv2d(before, after, 3, padding=1, bias=not leading_norm)]
            stages += [nn.BatchNorm2d(after), nn.ReLU()] if leading_norm else []
            stages += [ResidualBlock(after), nn.MaxPool2d(2)]
        self.stages = nn.Sequential(*stages)
        self.channels = widths[-1]
        self.stride = 8

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to (batch, 4w, height/8, width/8)."""
        features: Tensor = self.stages(images)
        return features


class VggEncoder(nn.Module):
    """The features of timm's ``vgg16_bn``, its channels scaled by w/128: 4w at 1/32 resolution."""

    def __init__(self, *, in_channels: int, width: int) -> None:
        super().__init__()
        from timm.models.vgg import VGG, cfgs  # only colour images need it, and it takes seconds

        stages = [
            stage if isinstance(stage, str) else max(1, stage * width // VGG_WIDTH)
            for stage in cfgs["vgg16"]
        ]
        # Of the head, which goes, as little as can be: it would be 120 million weights
        network = VGG(
            stages,
            num_classes=0,
            in_chans=in_channels,
            mlp_ratio=1 / 4096,
            norm_layer=nn.BatchNorm2d,
        )
        self.features: nn.Module = network.get_submodule("features")
        self.channels = network.num_features
        self.stride = 32

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to (batch, 4w, height/32, width/32)."""
        features: Tensor = self.features(images)
        return features


class RowEncoder(nn.Module):
    """A table's row as it is (logistic regression), or one hidden layer with GELU (mlp)."""

    def __init__(self, *, features: int, hidden: int) -> None:
        super().__init__()
        layers = [nn.Linear(features, hidden), nn.GELU()] if hidden else []
        self.layers = nn.Sequential(*layers)
        self.channels = hidden or features

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows (batch, features) to a map of one place, (batch, channels, 1, 1)."""
        hidden: Tensor = self.layers(rows)
        return hidden[:, :, None, None]
