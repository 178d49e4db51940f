"""Networks in two halves: an encoder that makes tokens, a head that classifies them.

The grey-scale encoder is the UEFL paper's (section 4, "a convolutional network comprising three
ResNet blocks"); colour images go through VGG16 features (timm); rows of a table are one token
each. Every method trains the same network from the same initial weights, so that a comparison
compares methods.
"""

from __future__ import annotations

import itertools
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.contract.errors import SettingError
from models.contract.seeding import seeded
from models.contract.settings import CommonSettings
from models.contract.settings_schema import as_mapping, defaults
from models.maths.dirichlet import Evidence

_IMAGE_NETWORKS = ("conv", "vgg16-bn", "resnet22", "vit")  # the first is the one that 'auto' means
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


class FrozenPart(nn.Module):
    """Weights that every site has from elsewhere and none trains: they are never exchanged."""


class TokenClassifier(nn.Module):
    """Encoder, tokens and a head that holds all dropout; with ``evidence`` it is evidential."""

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        *,
        tokens: int,
        channels: int,
        evidence: Evidence | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.tokens = tokens
        self.channels = channels
        self.head = head
        self.evidence = evidence

    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to tokens z (batch, l, c)."""
        maps: Tensor = self.encoder(inputs)
        return maps.flatten(2).transpose(1, 2)

    def encode_with_map(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``encode`` of inputs and the last feature map (batch, rows, columns, channels)."""
        maps: Tensor = self.encoder(inputs)
        return maps.flatten(2).transpose(1, 2), maps.permute(0, 2, 3, 1)

    def discretise(self, tokens: Tensor) -> Tensor:
        """Return what the head reads, (batch, l, c): here the tokens as they are."""
        return tokens

    def classify(self, features: Tensor) -> Tensor:
        """Map what the head reads, (batch, l, c), to logits (batch, classes).

        Of an evidential network they are log alpha: its expected probabilities are their softmax.
        """
        logits: Tensor = self.head(features.flatten(1))
        return self.evidence(logits) if self.evidence else logits

    def criterion(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy, or the evidential loss, of a batch's logits."""
        if self.evidence:
            return self.evidence.loss(logits, labels)
        return nn.functional.cross_entropy(logits, labels)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the criterion of a batch."""
        return self.criterion(self(inputs), labels)

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


def check_network_settings(settings: CommonSettings) -> None:
    """Refuse settings of a ViT where there is none, and of evidence where it is not evidential.

    Raises:
        SettingError: such a key has not its default.
    """
    values, usual = as_mapping(settings), defaults(CommonSettings)
    of_vit = ("backbone", "train-backbone", "prompt-", "basic-")
    takes_weights = settings.network in ("vit", "resnet22")
    evidential = settings.loss == "evidential" or settings.network == "vit"
    for key, value in values.items():
        if value == usual[key]:
            continue
        if key == "backbone-weights" and takes_weights:
            continue
        if key == "gradient-checkpointing" and settings.network != "resnet22":
            raise SettingError(
                f"setting '{key}' means nothing to network '{settings.network}': remove it, or "
                "set 'network' to 'resnet22'"
            )
        if key.startswith(of_vit) and settings.network != "vit":
            raise SettingError(
                f"setting '{key}' means nothing to network '{settings.network}': remove it, or "
                "set 'network' to 'vit'"
            )
        if key == "evidence" and (settings.loss == "cross-entropy" or not evidential):
            raise SettingError(
                "setting 'evidence' means nothing to cross-entropy: remove it, or set 'loss' to "
                "'evidential'"
            )


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


def build_classifier(settings: CommonSettings, task: Task) -> TokenClassifier:
    """Build the network of ``settings`` for ``task``, with initial weights keyed on the seed.

    Raises:
        SettingError: the network does not take such data, or the images are too small for it.
    """
    kind = network_kind(settings, task)
    with seeded(settings.seed, "initial-weights"):
        if len(task.input_shape) == 1:
            return _row_classifier(settings, task, settings.width if kind == "mlp" else 0)
        if kind == "vit":
            from models.networks.prompted_vit import build_prompted_vit  # imports timm, seconds

            return build_prompted_vit(settings, task)
        return _image_classifier(settings, task, kind)


def build_evidence(settings: CommonSettings, task: Task) -> Evidence | None:
    """Return what makes the network of ``settings`` evidential, None if it is not."""
    evidential = settings.loss == "evidential" or (
        settings.loss == "auto" and network_kind(settings, task) == "vit"
    )
    return Evidence(task.classes, settings.evidence) if evidential else None


def _row_classifier(settings: CommonSettings, task: Task, hidden: int) -> TokenClassifier:
    encoder = RowEncoder(features=task.input_shape[0], hidden=hidden)
    head = nn.Sequential(nn.Dropout(settings.dropout), nn.Linear(encoder.channels, task.classes))
    evidence = build_evidence(settings, task)
    return TokenClassifier(encoder, head, tokens=1, channels=encoder.channels, evidence=evidence)


def _image_classifier(settings: CommonSettings, task: Task, kind: str) -> TokenClassifier:
    channels, height, width = task.input_shape
    if kind == "resnet22":
        return _radiograph_classifier(settings, task)
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
    evidence = build_evidence(settings, task)
    channels = encoder.channels
    return TokenClassifier(encoder, head, tokens=tokens, channels=channels, evidence=evidence)


def _radiograph_classifier(settings: CommonSettings, task: Task) -> TokenClassifier:
    from models.networks.resnet22 import RadiographClassifier, ResNet22, build_head, check_image

    channels, height, width = task.input_shape
    check_image(height, width)
    checkpointed = settings.gradient_checkpointing
    encoder = ResNet22(in_channels=channels, width=settings.width, checkpointed=checkpointed)
    head = build_head(encoder.channels, task.classes, settings.dropout)
    evidence = build_evidence(settings, task)
    return RadiographClassifier(
        encoder, head, tokens=1, channels=encoder.channels, evidence=evidence
    )


def exchanged_arrays(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and float buffers of ``module`` by name, sorted, but no frozen part's.

    Integer buffers (batch norm's step counters) have no mean and no effect here: they stay home.
    """
    parts = module.named_modules()
    frozen = tuple(f"{name}." for name, part in parts if isinstance(part, FrozenPart))
    state = module.state_dict()
    return {
        name: state[name]
        for name in sorted(state)
        if state[name].is_floating_point() and not name.startswith(frozen)
    }


def _few(names: AbstractSet[str]) -> str:
    """Name three of the names and count the others."""
    first = sorted(names)[:3]
    return f"{first} and {len(names) - 3} more" if len(names) > 3 else f"{first}"


def load_exchanged(module: nn.Module, arrays: dict[str, Tensor]) -> None:
    """Copy ``arrays`` into ``module``; the names must be those of ``exchanged_arrays``."""
    wanted = exchanged_arrays(module)
    if arrays.keys() != wanted.keys():
        missing = _few(wanted.keys() - arrays.keys())
        surplus = _few(arrays.keys() - wanted.keys())
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
