"""Networks in two halves: an encoder that makes tokens, a head that classifies them.

The grey-scale encoder is the UEFL paper's (section 4, "a convolutional network comprising three
ResNet blocks"); colour images go through VGG16 features (timm); rows of a table are one token
each. Every method trains the same network from the same initial weights, so that a comparison
compares methods.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.errors import SettingError
from models.seeding import seeded
from models.settings import CommonSettings

_IMAGE_NETWORKS = ("conv", "vgg16-bn")  # the first is the one that 'auto' means
_ROW_NETWORKS = ("logistic", "mlp")


@dataclass(frozen=True)
class Task:
    """What a network must solve.

    ``input_shape`` is (channels, height, width) of an image, or (features,) of a table's row.
    """

    input_shape: tuple[int, ...]
    classes: int


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
    """Three stages of conv 3x3, residual block and 2x2 max-pool, widths w, 2w and 4w."""

    def __init__(self, *, in_channels: int, width: int) -> None:
        super().__init__()
        widths = [in_channels, width, 2 * width, 4 * width]
        stages: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            stages += [
                nn.Conv2d(before, after, 3, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
                ResidualBlock(after),
                nn.MaxPool2d(2),
            ]
        self.stages = nn.Sequential(*stages)
        self.channels = widths[-1]
        self.stride = 8

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to (batch, 4w, height/8, width/8)."""
        features: Tensor = self.stages(images)
        return features


class VggEncoder(nn.Module):
    """The convolutional features of timm's ``vgg16_bn``: 512 channels at 1/32 resolution."""

    def __init__(self, *, in_channels: int) -> None:
        super().__init__()
        import timm  # only colour images need it, and it takes seconds to import

        network = timm.create_model("vgg16_bn", pretrained=False, in_chans=in_channels)
        self.features: nn.Module = network.get_submodule("features")
        self.channels = 512
        self.stride = 32

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, in_channels, height, width) to (batch, 512, height/32, width/32)."""
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


class TokenClassifier(nn.Module):
    """Encoder, tokens and a head that holds all dropout."""

    def __init__(self, encoder: nn.Module, head: nn.Module, *, tokens: int, channels: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.tokens = tokens
        self.channels = channels
        self.head = head

    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to tokens z (batch, l, c)."""
        maps: Tensor = self.encoder(inputs)
        return maps.flatten(2).transpose(1, 2)

    def discretise(self, tokens: Tensor) -> Tensor:
        """Return what the head reads, (batch, l, c): here the tokens as they are."""
        return tokens

    def classify(self, features: Tensor) -> Tensor:
        """Map what the head reads, (batch, l, c), to logits (batch, classes)."""
        logits: Tensor = self.head(features.flatten(1))
        return logits

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        return nn.functional.cross_entropy(self(inputs), labels)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to logits (batch, classes)."""
        return self.classify(self.discretise(self.encode(inputs)))


def network_kind(settings: CommonSettings, task: Task) -> str:
    """Return the network that ``settings.network`` means for ``task``.

    Raises:
        SettingError: it is an image network and the data are a table, or the other way round.
    """
    of_task = _ROW_NETWORKS if len(task.input_shape) == 1 else _IMAGE_NETWORKS
    kind = of_task[0] if settings.network == "auto" else settings.network
    if kind not in of_task:
        data = "a table" if of_task is _ROW_NETWORKS else "images"
        raise SettingError(
            f"network '{kind}' does not take data set '{settings.dataset}', which is {data}: set "
            f"'network' to {' or '.join(of_task)}"
        )
    return kind


def build_classifier(settings: CommonSettings, task: Task) -> TokenClassifier:
    """Build the network of ``settings`` for ``task``, with initial weights keyed on the seed.

    Raises:
        SettingError: the network does not take such data, or the images are too small for it.
    """
    kind = network_kind(settings, task)
    with seeded(settings.seed, "initial-weights"):
        if len(task.input_shape) == 1:
            return _row_classifier(settings, task, settings.width if kind == "mlp" else 0)
        return _image_classifier(settings, task, kind)


def _row_classifier(settings: CommonSettings, task: Task, hidden: int) -> TokenClassifier:
    encoder = RowEncoder(features=task.input_shape[0], hidden=hidden)
    head = nn.Sequential(nn.Dropout(settings.dropout), nn.Linear(encoder.channels, task.classes))
    return TokenClassifier(encoder, head, tokens=1, channels=encoder.channels)


def _image_classifier(settings: CommonSettings, task: Task, kind: str) -> TokenClassifier:
    channels, height, width = task.input_shape
    encoder: ConvEncoder | VggEncoder
    if kind == "conv":
        encoder = ConvEncoder(in_channels=channels, width=settings.width)
        hidden = 4 * settings.width
    else:
        encoder, hidden = VggEncoder(in_channels=channels), 512
    tokens = (height // encoder.stride) * (width // encoder.stride)
    if tokens == 0:
        raise SettingError(
            f"network '{kind}' divides images by {encoder.stride}, "
            f"which leaves nothing of {height}x{width} pixels; choose another 'network'"
        )
    head = nn.Sequential(
        nn.Dropout(settings.dropout),
        nn.Linear(tokens * encoder.channels, hidden),
        nn.GELU(),
        nn.Dropout(settings.dropout),
        nn.Linear(hidden, task.classes),
    )
    return TokenClassifier(encoder, head, tokens=tokens, channels=encoder.channels)


def exchanged_arrays(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and float buffers of ``module`` by name, sorted.

    Integer buffers (batch norm's step counters) have no mean and no effect here: they stay home.
    """
    state = module.state_dict()
    return {name: state[name] for name in sorted(state) if state[name].is_floating_point()}


def load_exchanged(module: nn.Module, arrays: dict[str, Tensor]) -> None:
    """Copy ``arrays`` into ``module``; the names must be those of ``exchanged_arrays``."""
    wanted = exchanged_arrays(module)
    if arrays.keys() != wanted.keys():
        missing = sorted(wanted.keys() - arrays.keys())
        surplus = sorted(arrays.keys() - wanted.keys())
        raise SettingError(f"weights do not fit the network: missing {missing}, surplus {surplus}")
    for name, target in wanted.items():
        if arrays[name].shape != target.shape:
            raise SettingError(
                f"weights do not fit the network: '{name}' is {tuple(arrays[name].shape)}, "
                f"not {tuple(target.shape)}"
            )
    with torch.no_grad():
        for name, target in wanted.items():
            target.copy_(arrays[name])
