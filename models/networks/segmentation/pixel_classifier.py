"""Segmentation networks as a site's network, so that federated methods can train them."""

from typing import Any

import torch
from torch import Tensor, nn

from fedsilo.core.errors import SettingError
from fedsilo.core.plugins import resolve_plugin
from fedsilo.core.seeding import seed_generators
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.maths.mask_losses import PixelLoss
from fedsilo.models.networks.kinds import (
    OWN_NETWORKS,
    SEGMENTATION_NETWORKS,
    TIMM,
    NetworkShape,
)
from fedsilo.models.networks.plugged import call_builder, run_on_zeros
from fedsilo.models.networks.segmentation.build_segmentation import build_segmentation
from fedsilo.models.networks.site_network import TokenClassifier


class PixelClassifier(TokenClassifier):
    """A segmentation network as a ``TokenClassifier``: its tokens are the logits of the pixels.

    So the last layer of the network, which FedPer and FedRep keep at the site, computes the logits.
    There is no dropout, so predictions need only one pass.

    Args:
        segmenter: maps scaled images (batch, channels, h, w) to pixel logits (batch, classes, h,
            w); its arrays are exchanged under ``encoder.<name>``.
        shape: the shape of an image, and the number of classes with the background.
        dice_weight: the weight of the soft Dice loss, which is added to the cross-entropy; 0 or
            above.
    """

    has_dropout = False

    def __init__(self, segmenter: nn.Module, shape: NetworkShape, dice_weight: float) -> None:
        _, self.height, self.width = shape.input_shape
        pixels = self.height * self.width
        super().__init__(segmenter, nn.Identity(), tokens=pixels, channels=shape.outputs)
        self.criterion = PixelLoss(dice_weight)

    @property
    def vit(self) -> Any:
        """Return the ViT that the network contains.

        Raises:
            AttributeError: the network contains no ViT.
        """
        # ``load_backbone`` looks for the ViT whose published weights it reads
        inner = getattr(getattr(self.encoder, "pyramid", None), "network", None)
        if inner is None:
            raise AttributeError("vit")
        return inner.vit

    def classify(self, features: Tensor) -> Tensor:
        """Map tokens (batch, h * w, classes) to pixel logits (batch, classes, h, w)."""
        return torch.unflatten(features.transpose(1, 2), 2, (self.height, self.width))

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss, a scalar, of images (batch, ...) and masks (batch, h, w)."""
        return self.criterion(self.encoder(inputs), labels)


def build_pixel_classifier(settings: CommonSettings, shape: NetworkShape) -> PixelClassifier:
    """Build the segmentation network that the settings name, with weights drawn from the seed.

    'auto' is ``unet``. A plugin's builder returns a module that maps images (batch, *input_shape)
    to pixel logits (batch, classes, h, w). Such a module is checked once with two images of zeros.

    Args:
        settings: the run's settings, among them the network, its width and the seed.
        shape: the shape of an image, and the number of classes with the background.

    Raises:
        SettingError: the network classifies whole images or cannot be built for images of this
            shape, or a plugin's module fails in the check or returns no pixel logits.
    """
    name = settings.network
    if name == "auto":
        name = SEGMENTATION_NETWORKS[0]
    if name in SEGMENTATION_NETWORKS:
        segmenter: nn.Module = build_segmentation(name, settings, shape)
    elif name in OWN_NETWORKS or name.startswith(TIMM):
        raise SettingError(
            f"'network.name' is '{name}', which classifies whole images, but 'task' is "
            f"'segmentation': set 'network.name' to one of {', '.join(SEGMENTATION_NETWORKS)}"
        )
    else:
        with (
            seed_generators(settings.seed, "initial-weights"),
            torch.device("cpu"),  # foreign code may not run on the meta device
        ):
            builder = resolve_plugin("network", name, OWN_NETWORKS)
            segmenter = call_builder(name, builder, shape)
            _check_segmenter(name, segmenter, shape)
    return PixelClassifier(segmenter, shape, settings.dice_weight)


def _check_segmenter(name: str, module: nn.Module, shape: NetworkShape) -> None:
    """Check with two images of zeros that a plugin's network returns logits for each pixel.

    Raises:
        SettingError: the network fails on such images, or its result is not a tensor (2, classes,
            h, w) with the images' height and width.
    """
    logits: Any = run_on_zeros(name, module, shape, module)
    returned = tuple(getattr(logits, "shape", ()))
    wanted = (2, shape.outputs, *shape.input_shape[1:])
    if not isinstance(logits, Tensor) or returned != wanted:
        raise SettingError(
            f"network '{name}' must return pixel logits of {wanted} for 2 images and "
            f"{shape.outputs} classes, but returns {type(logits).__name__} of {returned}"
        )
