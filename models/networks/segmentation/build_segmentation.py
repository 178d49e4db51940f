"""Segmentation networks, an encoder of several scales with a U-Net's decoder, and their loss.

The four encoders of ``pyramids`` and ``swin``, the backbones of FedEFM's paper, share one decoder
(Ronneberger et al. 2015); ``swinunet`` has its own (``swin``). The loss is cross-entropy plus soft
Dice (Milletari et al. 2016).
"""

import itertools

import torch
from torch import Tensor, nn

from fedsilo.core.errors import SettingError
from fedsilo.core.seeding import seed_generators
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.maths.mask_losses import soft_dice_loss
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.segmentation.pyramids import (
    ConvPyramid,
    Pyramid,
    Segmenter,
    TransPyramid,
    ViTPyramid,
    convolution,
    pixel_head,
    resize_maps,
)
from fedsilo.models.networks.segmentation.swin import SwinPyramid, SwinUnet


class PyramidNetwork(Segmenter):
    """A pyramid encoder with U-Net's decoder.

    At each scale the decoder enlarges its map, concatenates the encoder's map and convolves twice.
    """

    def __init__(self, pyramid: Pyramid, classes: int) -> None:
        super().__init__(classes)
        self.pyramid = pyramid
        self.decoder = nn.ModuleList()
        for fine, coarse in itertools.pairwise(pyramid.widths):
            join = convolution(fine + coarse, fine)
            self.decoder.append(nn.Sequential(join, convolution(fine, fine)))
        self.head = pixel_head(pyramid.widths[0], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, channels, h, w) to pixel logits (batch, classes, h, w).

        The images are scaled by ``float_inputs`` before. The decoder starts from the encoder's
        coarsest map. Step by step it resizes the map to the encoder's next finer map, concatenates
        the two maps and convolves them. The last layer turns the finest map into logits.
        """
        *finer, x = self.pyramid(images)
        for skip, block in zip(reversed(finer), reversed(self.decoder), strict=True):
            x = block(torch.cat([resize_maps(x, skip.shape[-2:]), skip], dim=1))
        logits: Tensor = self.head(x)
        return logits

    def coarsest(self, images: Tensor) -> Tensor:
        """Map images to the encoder's last map (batch, c, rows, columns)."""
        last: Tensor = self.pyramid(images)[-1]
        return last

    def trunk(self) -> nn.Module | None:
        """Return the part of the network that can take the weights of an earlier classifier.

        The part's arrays have the same names as in the run of that classifier:

        - U-Net: the convolutional encoder, under the name ``encoder``.
        - A network with a ViT: the ViT with its prompts.
        - Swin: no part, None.
        """
        if isinstance(self.pyramid, ConvPyramid):
            return nn.ModuleDict({"encoder": self.pyramid.encoder})
        if isinstance(self.pyramid, ViTPyramid | TransPyramid):
            return self.pyramid.network
        return None


def build_segmentation(kind: str, settings: CommonSettings, shape: NetworkShape) -> Segmenter:
    """Build a segmentation network for images of a shape, with initial weights drawn from the seed.

    All parts are trained, including a ViT's backbone.

    Args:
        kind: ``unet``, ``vit``, ``swin``, ``swinunet`` or ``transunet``.
        settings: the seed, 'network.width' and the settings of the ViT.
        shape: the image size and the classes, which include the background.

    Raises:
        SettingError: the images do not fit the network.
    """
    channels, height, width = shape.input_shape
    base, size = settings.width, (height, width)
    pyramid: Pyramid
    with seed_generators(settings.seed, "initial-weights"):
        if kind == "swinunet":
            return SwinUnet(in_channels=channels, size=size, width=base, classes=shape.outputs)
        if kind == "swin":
            pyramid = SwinPyramid(in_channels=channels, size=size, width=base)
        elif kind == "unet":
            if min(size) < 8:
                raise SettingError(
                    f"network 'unet' divides images by 8, which leaves nothing of {height}x{width} "
                    "pixels: set 'data.image-size'"
                )
            pyramid = ConvPyramid(in_channels=channels, width=base)
        else:
            # Imported here, because timm takes seconds to import
            from fedsilo.models.networks.prompted_vit import PromptedViT, build_vit

            vit = PromptedViT(build_vit(settings, shape), shape, settings)
            if kind == "vit":
                pyramid = ViTPyramid(vit, in_channels=channels, width=base)
            else:
                pyramid = TransPyramid(vit, in_channels=channels, width=base)
        return PyramidNetwork(pyramid, shape.outputs)


def segmentation_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Compute the mean cross-entropy over all pixels plus the soft Dice loss, a scalar.

    Args:
        logits: (batch, classes, h, w), with at least two classes.
        masks: each pixel's class, (batch, h, w). 0 is the background.
    """
    entropy = nn.functional.cross_entropy(logits.float(), masks.long())
    return entropy + soft_dice_loss(logits, masks)
