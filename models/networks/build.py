"""Building the network that the settings name.

Every method trains the same network from the same initial weights, so that a comparison compares
methods.
"""

from __future__ import annotations

from torch import nn

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.seeding import seeded
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.classifier import TokenClassifier, build_evidence
from fedsilo.models.networks.encoders import ConvEncoder, RowEncoder, VggEncoder
from fedsilo.models.networks.kinds import Task, network_kind
from fedsilo.models.networks.resnet22 import (
    RadiographClassifier,
    ResNet22,
    build_head,
    build_published_head,
    check_image,
)


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
            from fedsilo.models.networks.prompted_vit import (
                build_prompted_vit,  # imports timm, seconds
            )

            return build_prompted_vit(settings, task)
        return _image_classifier(settings, task, kind)


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
        encoder = ConvEncoder(
            in_channels=channels, width=settings.width, leading_norm=settings.leading_norm
        )
    else:
        encoder = VggEncoder(in_channels=channels, width=settings.width)
    hidden = encoder.channels
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
    channels, height, width = task.input_shape
    check_image(height, width)
    checkpointed = settings.gradient_checkpointing
    encoder = ResNet22(in_channels=channels, width=settings.width, checkpointed=checkpointed)
    if settings.classifier == "published":
        head = build_published_head(encoder.channels, task.classes)
    else:
        head = build_head(encoder.channels, task.classes, settings.dropout)
    evidence = build_evidence(settings, task)
    return RadiographClassifier(
        encoder, head, tokens=1, channels=encoder.channels, evidence=evidence
    )
