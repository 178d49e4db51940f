"""Which network the settings mean for which data, and which settings mean something to it."""

from __future__ import annotations

from dataclasses import dataclass

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import as_mapping, defaults, keys_with

_IMAGE_NETWORKS = ("conv", "vgg16-bn", "resnet22", "vit")  # the first is the one that 'auto' means
# UEFL's data sets in colour, where 'auto' means its VGG16. It goes by name: by channels it would
# change the network of every run on a hospital's own photographs
_AUTO = {"cifar10": "vgg16-bn", "cifar100": "vgg16-bn", "gtsrb": "vgg16-bn"}
_ROW_NETWORKS = ("logistic", "mlp")
_OF_VIT = frozenset(keys_with(CommonSettings, "vit"))
_OF_RESNET22 = frozenset({"gradient-checkpointing", "classifier"})


@dataclass(frozen=True)
class Task:
    """What a network must solve.

    ``input_shape`` is (channels, height, width) of an image, or (features,) of a table's row.
    """

    input_shape: tuple[int, ...]
    classes: int


def network_kind(settings: CommonSettings, task: Task) -> str:
    """Return the network that ``settings.network`` means for ``task``.

    Raises:
        SettingError: it is an image network and the data are a table, or the other way round.
    """
    of_task = _ROW_NETWORKS if len(task.input_shape) == 1 else _IMAGE_NETWORKS
    kind = settings.network
    if kind == "auto":
        kind = _AUTO.get(settings.dataset, of_task[0])
    if kind not in of_task:
        data = "a table" if of_task is _ROW_NETWORKS else "images"
        raise SettingError(
            f"network '{kind}' does not take data set '{settings.dataset}', which is {data}: set "
            f"'network' to {' or '.join(of_task)}"
        )
    return kind


def meant_network(settings: CommonSettings, usual: str = _IMAGE_NETWORKS[0]) -> str:
    """Return the network that the settings name; 'auto' is ``usual`` or the data set's own."""
    if settings.network != "auto":
        return settings.network
    return _AUTO.get(settings.dataset, usual)


def check_network_settings(settings: CommonSettings) -> None:
    """Refuse settings of a ViT where there is none, and of evidence where it is not evidential.

    Raises:
        SettingError: such a key has not its default.
    """
    values, usual = as_mapping(settings), defaults(CommonSettings)
    takes_weights = settings.network in ("vit", "resnet22")
    evidential = settings.loss == "evidential" or settings.network == "vit"
    # A key that does nothing is refused, not ignored: who sets it believes that it does something
    for key, value in values.items():
        if value == usual[key]:
            continue
        if key == "backbone-weights" and takes_weights:  # also resnet22's, which has no other
            continue
        if key in _OF_RESNET22 and settings.network != "resnet22":
            raise SettingError(
                f"setting '{key}' means nothing to network '{settings.network}': remove it, or "
                "set 'network' to 'resnet22'"
            )
        if key == "leading-norm" and meant_network(settings) != "conv":
            raise SettingError(
                f"setting '{key}' means nothing to network '{meant_network(settings)}': remove it, "
                "or set 'network' to 'conv'"
            )
        if key in _OF_VIT and settings.network != "vit":
            raise SettingError(
                f"setting '{key}' means nothing to network '{settings.network}': remove it, or "
                "set 'network' to 'vit'"
            )
        if key == "classifier" and not settings.backbone_weights:
            raise SettingError(
                "setting 'classifier' is 'published', and 'backbone-weights' names no file to take "
                "it from: set 'backbone-weights' to Wu et al.'s file, or 'classifier' to 'seed'"
            )
        if key == "evidence" and (settings.loss == "cross-entropy" or not evidential):
            raise SettingError(
                "setting 'evidence' means nothing to cross-entropy: remove it, or set 'loss' to "
                "'evidential'"
            )
