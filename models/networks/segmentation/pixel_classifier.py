"""Segmentation networks as a site's network, so that federated methods can train them."""

from typing import Any, cast

from torch import Tensor, nn

from fedsilo.core.errors import SettingError
from fedsilo.core.one_line import reason_of
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.segmentation.build_segmentation import soft_dice_loss
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

    def __init__(self, segmenter: nn.Module, shape: NetworkShape, dice_weight: float) -> None:
        _, self.height, self.width = shape.input_shape
        pixels = self.height * self.width
        super().__init__(segmenter, nn.Identity(), tokens=pixels, channels=shape.outputs)
        self.criterion = PixelLoss(dice_weight)

    @property
    def vit(self) -> Any:
        """The ViT that the network contains; AttributeError if it contains none."""
        # ``load_backbone`` looks for the ViT whose published weights it reads
        inner = getattr(getattr(self.encoder, "pyramid", None), "network", None)
        if inner is None:
            raise AttributeError("vit")
        return inner.vit

    def classify(self, features: Tensor) -> Tensor:
        """Map tokens (batch, h * w, classes) to pixel logits (batch, classes, h, w)."""
        maps = features.transpose(1, 2)
        return maps.reshape(len(maps), self.channels, self.height, self.width)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss, a scalar, of images (batch, ...) and masks (batch, h, w)."""
        logits: Tensor = self.criterion(self.encoder(inputs), labels)
        return logits


class PixelLoss:
    """The mean cross-entropy of the pixels, plus a weight times the soft Dice loss."""

    def __init__(self, dice_weight: float) -> None:
        self.dice_weight = dice_weight

    def __call__(self, logits: Tensor, masks: Tensor) -> Tensor:
        """Compute the loss, a scalar, of logits (batch, classes, h, w) and masks (batch, h, w)."""
        entropy = nn.functional.cross_entropy(logits.float(), masks.long())
        if not self.dice_weight:
            return entropy
        return entropy + self.dice_weight * soft_dice_loss(logits, masks)


def check_segmenter(name: str, module: nn.Module, shape: NetworkShape) -> None:
    """Check, with two images of zeros, that a plugin's network returns logits for each pixel.

    Running statistics do not change, and the network is in training mode afterwards.

    Args:
        name: the network's name, for errors.
        module: the network.
        shape: the shape of an image, and the number of classes with the background.

    Raises:
        SettingError: the network fails on such images, or returns something else.
    """
    import torch

    batch = torch.zeros(2, *shape.input_shape)
    wanted = (2, shape.outputs, *shape.input_shape[1:])
    module.eval()
    try:
        with torch.no_grad():
            logits = module(batch)
    except Exception as error:  # foreign code may raise anything
        raise SettingError(
            f"network '{name}' does not take inputs of {shape.input_shape} ({reason_of(error)})"
        ) from None
    finally:
        module.train()
    returned = tuple(getattr(logits, "shape", ()))
    if not isinstance(logits, Tensor) or returned != wanted:
        raise SettingError(
            f"network '{name}' must return pixel logits of {wanted} for 2 images and "
            f"{shape.outputs} classes, but returns {type(logits).__name__} of {returned}"
        )


def as_pixel_classifier(network: nn.Module) -> PixelClassifier:
    """Return ``network`` as the pixel classifier that it is; the type is not checked."""
    return cast(PixelClassifier, network)
