"""The rules that choose a network for the data, and the settings that apply to a network."""

from dataclasses import dataclass

from fedsilo.core.errors import SettingError
from fedsilo.core.plugins import resolve_plugin
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import as_mapping, defaults, keys_in

IMAGE_NETWORKS = ("conv", "vgg16-bn", "resnet22", "vit")  # 'auto' means the first
ROW_NETWORKS = ("logistic", "mlp")
# The networks of task 'segmentation'; 'auto' means the first, and 'vit' classifies images too
SEGMENTATION_NETWORKS = ("unet", "swin", "swinunet", "vit", "transunet")
# Any other name is a plugin's or timm's
OWN_NETWORKS = frozenset({"auto", *IMAGE_NETWORKS, *ROW_NETWORKS, *SEGMENTATION_NETWORKS})
TIMM = "timm:"  # prefix of the name of a timm classifier
# 'auto' means VGG16 for UEFL's data sets in colour. They are listed by name: a rule by channels
# would change the network of every run on a hospital's own photographs
AUTO_NETWORKS = {"cifar10": "vgg16-bn", "cifar100": "vgg16-bn", "gtsrb": "vgg16-bn"}
# Setting -> the only network that reads it
_APPLIES_TO = dict.fromkeys(keys_in(CommonSettings, "vit"), "vit") | {
    "network.gradient-checkpointing": "resnet22",
    "network.classifier": "resnet22",
    "network.leading-norm": "conv",
}


@dataclass(frozen=True)
class NetworkShape:
    """The shape of a network's inputs, and its number of outputs.

    Attributes:
        input_shape: (channels, height, width) of an image, or (features,) of a table's row.
        outputs: the numbers that the network computes: one for each class or finding, or 1 for a
            numeric outcome.
    """

    input_shape: tuple[int, ...]
    outputs: int


def image_network(settings: CommonSettings) -> str:
    """Return the network of a run on images: 'network.name', with 'auto' resolved.

    'auto' becomes 'vgg16-bn' for the data sets in ``AUTO_NETWORKS``, which are CIFAR and GTSRB. For
    any other data set it becomes 'conv'. Whether the name exists, or the data are images, is not
    checked.
    """
    if settings.network != "auto":
        return settings.network
    return AUTO_NETWORKS.get(settings.dataset, IMAGE_NETWORKS[0])


def check_network_settings(settings: CommonSettings) -> None:
    """Check that the run's network uses each network setting that was changed from its default.

    Without this check a user would believe that an unused setting has an effect.

    Raises:
        SettingError: in one of these cases:

            - The network does not use a changed setting.
            - 'network.classifier' is 'published', but 'vit.backbone-weights' names no file with it.
            - 'train.evidence' is changed, but the loss is cross-entropy.
            - 'network.name' names a plugin that cannot be imported.
    """
    if settings.network not in OWN_NETWORKS and not settings.network.startswith(TIMM):
        resolve_plugin("network", settings.network, OWN_NETWORKS)
    values, usual = as_mapping(settings), defaults(CommonSettings)
    for key, value in values.items():
        if value == usual[key]:
            continue
        network = settings.network
        # 'auto' never means a ViT or a ResNet-22, but for some data sets it means VGG16, not 'conv'
        if key == "network.leading-norm":
            network = image_network(settings)
        wanted = _APPLIES_TO.get(key, network)
        if key == "vit.backbone-weights" and network == "resnet22":
            # The table above names 'vit', but this network also reads published weights
            continue
        if network != wanted:
            raise SettingError(
                f"setting '{key}' has no effect with network '{network}': remove it, or "
                f"set 'network.name' to '{wanted}'"
            )
        if key == "network.classifier" and not settings.backbone_weights:
            raise SettingError(
                "setting 'network.classifier' is 'published', and 'vit.backbone-weights' names no "
                "file to take it from: set 'vit.backbone-weights' to Wu et al.'s file, or "
                "'network.classifier' to 'seed'"
            )
        auto_evidential = settings.loss == "auto" and network == "vit"
        if key == "train.evidence" and settings.loss != "evidential" and not auto_evidential:
            raise SettingError(
                "setting 'train.evidence' has no effect with cross-entropy: remove it, or set "
                "'train.loss' to 'evidential'"
            )
