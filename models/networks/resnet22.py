"""ResNet-22, the feature extractor for mammograms of about 4 megapixels (Wu et al. 2019).

Names and shapes are those of the published weights: a 7x7 convolution of stride 2, a 3x3 max-pool
of stride 2, five stages of two pre-activation blocks (He et al. 2016), batch norm and ReLU. The
Fed-Align-CL paper's table IV prints other first layers than the weights that it loads have; here
the weights decide.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.maths.dirichlet import Evidence
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import TokenClassifier

_STAGES = 5
_HIDDEN = (128, 64)  # hidden units of the paper's classifier, which reads 256 channels
_SMALLEST_IMAGE = 16  # pixels of a side


class PreActivationBlock(nn.Module):
    """Batch norm, ReLU and a 3x3 convolution, twice, and a shortcut around them.

    The first block of a stage projects its shortcut by a 1x1 convolution, with its stride.
    """

    def __init__(self, before: int, after: int, *, stride: int, projects: bool) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        # Made in any case, because the layers that follow draw from the same generator
        projection = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False))
        self.downsample = None
        if projects:
            self.downsample = projection

    def forward(self, x: Tensor) -> Tensor:
        """Apply batch norm, ReLU and a convolution twice, and add a shortcut.

        The shortcut is the input. In the first block of a stage, a 1x1 convolution of the input
        after the first batch norm and ReLU replaces it. Maps (batch, before, height, width) become
        (batch, after, height/stride, width/stride), with the sides rounded up.
        """
        active = torch.relu(self.bn1(x))
        shortcut = x
        if self.downsample is not None:
            shortcut = self.downsample(active)
        body: Tensor = self.conv2(torch.relu(self.bn2(self.conv1(active))))
        return body + shortcut


class ResNet22(nn.Module):
    """Maps grey images to embeddings, which are the mean over the places of the last maps.

    Attributes:
        channels: length of an embedding, 16 times ``width``; 256 as published.
        checkpointed: whether training keeps only the inputs of blocks and computes the other
            activations again in the backward pass, which saves memory and takes time.
    """

    def __init__(self, *, in_channels: int, width: int = 16, checkpointed: bool = False) -> None:
        super().__init__()
        self.first_conv = nn.Conv2d(in_channels, width, 7, stride=2, bias=False)
        self.first_pool = nn.MaxPool2d(3, stride=2)
        self.layer_list = nn.ModuleList()
        before, stride = width, 1
        for stage in range(_STAGES):
            after = width * 2**stage
            self.layer_list.append(
                nn.Sequential(
                    PreActivationBlock(before, after, stride=stride, projects=True),
                    PreActivationBlock(after, after, stride=1, projects=False),
                )
            )
            before, stride = after, 2  # each stage but the first halves the maps
        self.final_bn = nn.BatchNorm2d(before)
        # A module and not torch.relu(), so Grad-CAM can hook the last maps
        self.final_relu = nn.ReLU()
        self.channels = before
        self.checkpointed = checkpointed

    def maps(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to feature maps (batch, channels, h, w).

        The maps are the output of the last layer. Their sides are about 64 times shorter: 2048 x
        2048 pixels give maps of 32 x 32. If ``checkpointed`` is set, the blocks save memory by
        gradient checkpointing when the network is trained.
        """
        checkpoints = self.checkpointed and self.training and torch.is_grad_enabled()
        hidden = self.first_pool(self.first_conv(images))
        for stage in self.layer_list:
            for block in cast(nn.Sequential, stage):
                hidden = _run_checkpointed(block, hidden) if checkpoints else block(hidden)
        last: Tensor = self.final_relu(self.final_bn(hidden))
        return last

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to embeddings (batch, channels, 1, 1)."""
        return self.maps(images).mean(dim=(2, 3), keepdim=True)


class RadiographClassifier(TokenClassifier):
    """A ``ResNet22`` with a head; its only token is the mean over the feature map."""

    def encode_with_map(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the token (batch, 1, c) and the last feature map (batch, rows, columns, c)."""
        maps: Tensor = cast(ResNet22, self.encoder).maps(inputs)
        return maps.mean(dim=(2, 3))[:, None], maps.permute(0, 2, 3, 1)


def _run_checkpointed(block: nn.Module, hidden: Tensor) -> Tensor:
    """Run a block of layers with gradient checkpointing, which saves memory but takes more time.

    The forward pass keeps only the block's input ``hidden``. The backward pass runs the block a
    second time to compute its activations again. The second run does not update the running means
    and variances of batch norms.
    """
    # The recomputation sees the same batch again: without the context, batch norm's running
    # statistics would take it in twice, and checkpointing would change the model
    output: Tensor = checkpoint(
        block,
        hidden,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), still_statistics(block)),
    )
    return output


@contextmanager
def still_statistics(module: nn.Module) -> Iterator[None]:
    """Keep the running statistics of all 1D and 2D batch norms in a ``with`` block.

    Inside the ``with`` block the momentum of each batch norm is 0. Even in training mode a batch
    then does not change the running mean and variance. Afterwards the momenta are restored.
    """
    # Eval mode would keep the statistics too, but would normalise by them instead of by the batch
    momenta = {}
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            momenta[part] = part.momentum
            part.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in momenta.items():
            norm.momentum = momentum


def build_head(channels: int, classes: int, dropout: float) -> nn.Sequential:
    """Build a classifier of two hidden layers and a linear layer that gives the logits.

    A hidden layer is a linear layer, batch norm, ReLU and dropout. For 256 channels the hidden
    layers have 128 and 64 units. For another number of channels their width is scaled in
    proportion, down to 2 units.
    """
    layers: list[nn.Module] = []
    before = channels
    for hidden in _HIDDEN:
        after = max(hidden * channels // 256, 2)
        layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU(), nn.Dropout(dropout)]
        before = after
    return nn.Sequential(*layers, nn.Linear(before, classes))


def build_published_head(channels: int, classes: int) -> nn.Sequential:
    """Build the classifier of Wu et al.'s weights: a hidden layer, ReLU, and two logits.

    The hidden layer has as many units as its input. The weights are random until
    ``fill_published_head`` loads the published ones.

    Args:
        channels: the number of features, and of units in the hidden layer.
        classes: the number of classes of the data.

    Raises:
        SettingError: ``classes`` is not 2. The published classifier has only the classes malignant
            and not malignant.
    """
    if classes != 2:
        raise SettingError(
            "setting 'network.classifier' is 'published', which has two classes, malignant or "
            f"not, but the data have {classes} classes: set it to 'seed'"
        )
    return nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, classes))


def build_radiograph_classifier(
    settings: CommonSettings, shape: NetworkShape, evidence: Evidence | None
) -> RadiographClassifier:
    """Build ResNet-22 with the head that 'network.classifier' names.

    'published' is Wu et al.'s classifier, and 'seed' has two hidden layers with batch norm. The
    initial weights are random, and published weights are loaded later.

    Args:
        settings: 'network.width', 'network.classifier', the dropout rate, and whether to use
            gradient checkpointing.
        shape: the shape of the images and the number of classes.
        evidence: turns logits into evidence for an evidential loss. None for cross-entropy.

    Raises:
        SettingError: a side of the images is below 16 pixels, or the published classifier meets
            other than two classes.
    """
    channels, height, width = shape.input_shape
    if min(height, width) < _SMALLEST_IMAGE:
        raise SettingError(
            f"network 'resnet22' takes images of at least {_SMALLEST_IMAGE} pixels a side, but "
            f"these are {height}x{width}: choose network 'conv'"
        )
    # Without checkpoints, a radiograph of full size may not fit into a GPU's memory
    checkpointed = settings.gradient_checkpointing
    encoder = ResNet22(in_channels=channels, width=settings.width, checkpointed=checkpointed)
    size = encoder.channels
    if settings.classifier == "published":
        head = build_published_head(size, shape.outputs)
    else:
        head = build_head(size, shape.outputs, settings.dropout)
    return RadiographClassifier(encoder, head, tokens=1, channels=size, evidence=evidence)
