"""Encoders of images and rows, from inputs to maps (batch, channels, rows, columns).

The grey-scale encoder is the UEFL paper's (section 4, "a convolutional network comprising three
ResNet blocks"), the one for colour VGG16's features with batch norm (timm). At width w both end in
4w channels, 512 at the paper's 128. A row of a table becomes a map of one place.
"""

import itertools
from collections import OrderedDict

import torch
from torch import Tensor, nn

VGG_WIDTH = 128  # the width at which VGG16 is as published


def float_inputs(inputs: Tensor) -> Tensor:
    """Return inputs (batch, ...) as networks take them.

    8-bit images are scaled to -1..1. Images of int16 are radiographs of any depth, stored less
    32768; each is standardised by its own mean and standard deviation. Others are returned as is.
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
    """Two 3x3 convolutions with batch norm and an identity shortcut; the shape is unchanged."""

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


class ConvEncoder(nn.Sequential):
    """Maps images (batch, in_channels, height, width) to (batch, 4w, height/8, width/8).

    Three stages of 3x3 convolution, residual block and 2x2 max-pool, of widths w, 2w and 4w. With
    ``leading_norm`` batch norm and ReLU follow a stage's convolution; the authors' code has none.
    """

    stages: nn.Sequential
    stride = 8

    def __init__(self, *, in_channels: int, width: int, leading_norm: bool = True) -> None:
        widths = [in_channels, width, 2 * width, 4 * width]
        stages: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            # Batch norm subtracts the mean, so a bias before it would have no effect
            stages += [nn.Conv2d(before, after, 3, padding=1, bias=not leading_norm)]
            stages += [nn.BatchNorm2d(after), nn.ReLU()] if leading_norm else []
            stages += [ResidualBlock(after), nn.MaxPool2d(2)]
        super().__init__(OrderedDict(stages=nn.Sequential(*stages)))
        self.channels = widths[-1]


class VggEncoder(nn.Sequential):
    """The features of timm's ``vgg16_bn``, its channels scaled by w/128.

    Maps images (batch, in_channels, height, width) to (batch, 4w, height/32, width/32).
    """

    features: nn.Sequential
    stride = 32

    def __init__(self, *, in_channels: int, width: int) -> None:
        from timm.models.vgg import VGG, cfgs  # only colour images need it, and it takes seconds

        stages = [
            stage if isinstance(stage, str) else max(1, stage * width // VGG_WIDTH)
            for stage in cfgs["vgg16"]
        ]
        # The head is thrown away: the tiny ratio keeps timm from initialising 120 million weights
        network = VGG(
            stages,
            num_classes=0,
            in_chans=in_channels,
            mlp_ratio=1 / 4096,
            norm_layer=nn.BatchNorm2d,
        )
        super().__init__(OrderedDict(features=network.get_submodule("features")))
        self.channels = network.num_features


class RowEncoder(nn.Sequential):
    """Maps rows (batch, features) to a map of one place (batch, channels, 1, 1).

    The row is left as it is (logistic regression), or goes through one hidden layer with GELU
    (mlp) if ``hidden`` is not 0.
    """

    def __init__(self, *, features: int, hidden: int) -> None:
        layers = [nn.Linear(features, hidden), nn.GELU()] if hidden else []
        channels = hidden or features
        place = nn.Unflatten(1, (channels, 1, 1))
        super().__init__(OrderedDict(layers=nn.Sequential(*layers), place=place))
        self.channels = channels
