"""Encoders of images and rows, from inputs to maps (batch, channels, rows, columns).

The grey-scale encoder is the UEFL paper's (section 4, "a convolutional network comprising three
ResNet blocks"). The encoder for colour images is VGG16's features with batch norm (timm). At width
w both end in 4w channels, 512 at the paper's width of 128. A row of a table becomes a map of one
place.
"""

import itertools
from collections import OrderedDict

import torch
from torch import Tensor, nn

VGG_WIDTH = 128  # the width of the published VGG16


def float_inputs(inputs: Tensor) -> Tensor:
    """Convert stored inputs (batch, ...) to the float32 that networks take.

    - uint8 pixels are scaled from 0..255 to -1..1.
    - int16 pixels are those of radiographs. Each image is standardised by its own mean and standard
      deviation. An image whose pixels are all equal becomes 0.
    - Inputs of any other type are returned unchanged.
    """
    if inputs.dtype == torch.uint8:
        return inputs.float() / 127.5 - 1
    if inputs.dtype == torch.int16:
        pixels = inputs.float()
        axes = tuple(range(1, inputs.ndim))
        # The 32768 need not be added back: a shift of all pixels does not change the result
        spread, mean = torch.std_mean(pixels, dim=axes, keepdim=True, correction=0)
        # The spread of an image of one brightness is 0; the floor gives pixels of 0 instead of NaN
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

    It has three stages of widths w, 2w and 4w: a 3x3 convolution, a residual block and a 2x2
    max-pool. With ``leading_norm``, batch norm and ReLU follow the first convolution of a stage;
    the authors' code does not have them.
    """

    stages: nn.Sequential
    stride = 8

    def __init__(self, *, in_channels: int, width: int, leading_norm: bool = True) -> None:
        widths = [in_channels, width, 2 * width, 4 * width]
        stages: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            # Batch norm subtracts the mean, so a bias before it would have no effect
            stages += [nn.Conv2d(before, after, 3, padding=1, bias=not leading_norm)]
            if leading_norm:
                stages += [nn.BatchNorm2d(after), nn.ReLU()]
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
        # Imported here, because it takes seconds and only colour images need it
        from timm.models.vgg import VGG, cfgs

        stages: list[int | str] = []
        for stage in cfgs["vgg16"]:
            if isinstance(stage, str):  # "M", a max-pool
                stages.append(stage)
            else:
                stages.append(max(1, stage * width // VGG_WIDTH))
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
    """Maps rows (batch, features) to maps of a single place, (batch, channels, 1, 1).

    If ``hidden`` is 0, the row is left unchanged (logistic regression). Otherwise one layer of that
    width with GELU follows (mlp).
    """

    def __init__(self, *, features: int, hidden: int) -> None:
        layers: list[nn.Module] = []
        channels = features
        if hidden:
            layers = [nn.Linear(features, hidden), nn.GELU()]
            channels = hidden
        place = nn.Unflatten(1, (channels, 1, 1))
        super().__init__(OrderedDict(layers=nn.Sequential(*layers), place=place))
        self.channels = channels
