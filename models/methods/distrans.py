"""DisTrans (Yuan et al. 2022): each site's images are shifted by a learned offset, in two channels.

An offset t has the size of an image. A network of two input channels sees each image twice, moved
towards t and moved away from it, by alpha. One encoder and one dense part serve both channels; the
last layer reads both results. A site trains network and offset together. docs/methods/baselines.md
lists the differences from the authors' code.

Equations (arXiv:2210.15025):
  (transformation) both channels of an image -> models.methods.distrans.transform_images
  (network) backbone, dense and logits layers -> models.methods.distrans.DoubleChannelClassifier
  (local step) of the offset -> client_app.methods.distrans.DisTransSite.train
  (aggregation) of networks and offsets -> strategies.methods.distrans.DisTrans.round
  (embedding) offsets from class shares -> models.methods.distrans.OffsetEmbedding
"""

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from fedsilo.core.errors import SettingError
from fedsilo.core.seeding import generator, seed_generators
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting
from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.models.networks.kinds import TIMM
from fedsilo.models.networks.site_network import TokenClassifier

OFFSET = "offset.weight"  # the name on the wire and in the network; (pixels, 1)
OFFSETS = "offset/"  # offset/<site>, in a model with one offset for each site
_HIDDEN = 100  # hidden units of the embedding, as in the authors' code
OFFSET_ALPHA = 0.2  # alpha: how far the channels move towards the offset and away from it
EMBEDDING_LEARNING_RATE = 0.01  # step size of the embedding's SGD at the server


@dataclass(frozen=True)
class DisTransSettings(OwnSettings):
    """Settings of DisTrans; defaults are those of the authors' code, whose network takes SGD."""

    title = "DisTrans"
    tasks = (CLASSIFICATION,)
    why_tasks = "derives offsets from class shares"
    server = "fedsilo.strategies.methods.distrans:DisTrans"
    site = "fedsilo.client_app.methods.distrans:DisTransSite"

    offset_learning_rate: float = setting(
        0.001, "step size of the offset's SGD; 0 leaves it as it started", ge=0.0
    )
    offset_aggregation: Literal["mean", "embedding", "none"] = setting(
        "mean",
        "mean: all sites continue from the mean offset; embedding: from what a network at the "
        "server makes of their class shares (none: an offset never leaves its site)",
    )

    def check(self, common: CommonSettings, is_table: bool) -> None:
        """Check that the network is not a classifier of the library timm.

        DisTrans cannot use the head of such a classifier.

        Args:
            common: the run's common settings.
            is_table: ignored.

        Raises:
            SettingError: the network is a classifier of timm.
        """
        if common.network.startswith(TIMM):
            raise no_head_to_double(common)


def no_head_to_double(common: CommonSettings) -> SettingError:
    """Build the error for a network whose head DisTrans cannot use, which the caller raises.

    DisTrans replaces the last linear layer of a network's head. The error names the network in
    ``common`` and asks for another 'network.name'.
    """
    return SettingError(
        f"method 'distrans' doubles the head of fedsilo's own networks, or of a TokenClassifier "
        f"whose head ends in a linear layer, but '{common.network}' is neither: choose another "
        "'network.name'"
    )


def transform_images(images: Tensor, offsets: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Shift images x towards the offset t and away from it, for DisTrans's two channels.

    The results are (1 - alpha) x + alpha t and (1 + alpha) x - alpha t, whose mean is x.

    Args:
        images: x, (batch, channels, height, width).
        offsets: t, of the same shape.
        alpha: the strength of the shift. With 0 the images are not shifted.

    Returns:
        The images shifted towards t, then those shifted away from it.
    """
    # Both formulas are x -+ alpha (x - t), so the difference is computed only once
    shift = alpha * (images - offsets)
    return images - shift, images + shift


def to_pixels(values: Tensor, settings: CommonSettings) -> Tensor:
    """Map values from -1..1 to the range of the network's inputs.

    If 'data.pixel-scale' is "raw", the range is 0..255. Otherwise the values are unchanged.
    """
    if settings.pixel_scale == "raw":
        return 127.5 * (values + 1)
    return values


def from_pixels(pixels: Tensor, settings: CommonSettings) -> Tensor:
    """Map values from the range of the network's inputs back to -1..1."""
    if settings.pixel_scale == "raw":
        return pixels / 127.5 - 1
    return pixels


def first_offset(settings: CommonSettings, shape: tuple[int, ...], *key: str) -> Tensor:
    """Draw a site's random initial offset, which DisTrans trains and by which it shifts images.

    An offset is an image, as one column of pixel values for all channels, (channels * height *
    width, 1). The values are uniform in 0..255 if the run trains on raw pixels, and otherwise in
    -1..1. The same seed and ``key`` give the same offset.

    Args:
        settings: the run's settings: its seed, and whether it trains on raw pixels.
        shape: the shape of an image, (channels, height, width).
        key: further parts of the random key besides the seed, such as the site's name.
    """
    rng = generator(settings.seed, "offset", *key)
    return to_pixels(2 * torch.rand(math.prod(shape), 1, generator=rng) - 1, settings)


class DoubleHead(nn.Module):
    """A dense part that both channels share, and a logit layer that reads both dense outputs.

    Initially the logits equal those of the last layer of ``head`` for the mean of the two dense
    outputs, so a run starts from the same function as every other method.
    """

    def __init__(self, head: nn.Sequential) -> None:
        super().__init__()
        self.dense = head[:-1]
        single = cast(nn.Linear, head[-1])
        self.logits = nn.Linear(2 * single.in_features, single.out_features)
        with torch.no_grad():
            # Each channel gets half the weights, so the layer reads the mean of both channels
            self.logits.weight.copy_(single.weight.repeat(1, 2) / 2)
            self.logits.bias.copy_(single.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Map features (batch, 2 n), the second channel's last, to logits (batch, classes)."""
        hidden = self.dense(torch.cat(features.chunk(2, dim=1)))
        logits: Tensor = self.logits(torch.cat(_halves(hidden), dim=1))
        return logits


class DoubleChannelClassifier(TokenClassifier):
    """A classifier that sees each image in two channels, shifted by an offset.

    Args:
        single: the network with one channel, whose parts are taken over.
        offset: (pixels, 1).
        shape: the shape of an image, (channels, height, width).
        alpha: how far the channels are shifted.
    """

    views = 2

    def __init__(
        self, single: TokenClassifier, offset: Tensor, shape: tuple[int, ...], alpha: float
    ) -> None:
        super().__init__(
            single.encoder,
            DoubleHead(cast(nn.Sequential, single.head)),
            tokens=2 * single.tokens,
            channels=single.channels,
            evidence=single.evidence,
        )
        # The offset is the weights of a linear layer whose input is 1 for every sample. So code
        # that counts units or computes gradients per sample treats it like any other layer
        self.offset = nn.Linear(1, len(offset), bias=False)
        with torch.no_grad():
            self.offset.weight.copy_(offset)
        self.shape = shape
        self.alpha = alpha

    def apart_parameters(self) -> list[nn.Parameter]:
        """Return the offset, which has its own optimiser."""
        return list(self.offset.parameters())

    def both_channels(self, inputs: Tensor) -> Tensor:
        """Shift images (batch, channels, height, width) towards the site's offset and away from it.

        Returns:
            (2 * batch, channels, height, width): first all images shifted towards the offset, then
            all images shifted away from it.
        """
        # The small steps of the offset would be rounded away in bf16
        with torch.autocast(inputs.device.type, enabled=False):
            # len(inputs) would become a constant under torch.export; the shape stays a variable
            ones = self.offset.weight.new_ones(inputs.shape[0], 1)
            offsets = self.offset(ones).unflatten(1, self.shape)
            return torch.cat(transform_images(inputs.float(), offsets, self.alpha))

    def encode(self, inputs: Tensor) -> Tensor:
        """Compute an encoder's tokens for both channels of a batch of images.

        The first channel sees each image shifted towards the site's offset. The second channel sees
        it shifted away. One batch contains both channels, so batch norm computes its statistics
        over both.

        Args:
            inputs: images, (batch, channels, height, width).

        Returns:
            The tokens, (batch, 2 l, c). Each image has l tokens of the first channel, then l of the
            second.
        """
        tokens = super().encode(self.both_channels(inputs))
        return torch.cat(_halves(tokens), dim=1)


def _halves(rows: Tensor) -> tuple[Tensor, ...]:
    """Split rows (2 * batch, ...) into two halves; torch.export cannot follow ``chunk`` here."""
    return rows.reshape(2, rows.shape[0] // 2, *rows.shape[1:]).unbind()


def double_channels(
    single: TokenClassifier,
    settings: CommonSettings,
    shape: tuple[int, ...],
    *key: str,
) -> DoubleChannelClassifier:
    """Build DisTrans's two-channel network, with a random offset, from an ordinary network.

    One channel sees each image shifted towards the offset, and the other sees it shifted away. Only
    the last layer is new. Its first weights give the logits that the last layer of ``single`` gives
    for the mean of the two channels' features.

    Args:
        single: the ordinary network. The new network shares all layers but the last with it.
        settings: the run's settings.
        shape: the shape of an image, (channels, height, width).
        key: further parts of the offset's random key besides the seed, such as the site's name.

    Raises:
        SettingError: the head of ``single`` does not end in a linear layer.
    """
    if not isinstance(single.head, nn.Sequential) or not isinstance(single.head[-1], nn.Linear):
        raise no_head_to_double(settings)
    offset = first_offset(settings, shape, *key)
    # New layers draw weights although these are overwritten. Without this block the draws would
    # change all later random numbers
    with seed_generators(settings.seed, "double-channels"):
        return DoubleChannelClassifier(single, offset, shape, OFFSET_ALPHA)


class OffsetEmbedding(nn.Module):
    """Maps a site's class shares (classes,) to an offset (pixels, 1), in float64 at the server."""

    def __init__(self, classes: int, pixels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(classes, _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, pixels),
            nn.Tanh(),
        ).double()

    def forward(self, shares: Tensor) -> Tensor:
        """Map class shares (classes,) to an offset (pixels, 1) within -1..1."""
        offset: Tensor = self.layers(shares)
        return offset[:, None]

    def fit(self, shares: Tensor, offset: Tensor, rate: float) -> None:
        """Take one step of SGD, so that a site's class shares predict the site's offset better.

        The loss is the mean squared difference between the embedding of the class shares and the
        offset.

        Args:
            shares: the site's class shares, (classes,).
            offset: the offset that the site has trained, in -1..1, (pixels, 1).
            rate: the step size.
        """
        optimiser = torch.optim.SGD(self.parameters(), lr=rate)
        optimiser.zero_grad()
        distance = nn.functional.mse_loss(self(shares), offset)
        distance.backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
        optimiser.step()


def build_embedding(seed: int, classes: int, pixels: int) -> OffsetEmbedding:
    """Build the embedding with initial weights drawn from ``seed``."""
    with seed_generators(seed, "offset-embedding"):
        return OffsetEmbedding(classes, pixels)
