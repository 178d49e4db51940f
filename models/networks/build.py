"""Build the network that the settings name.

Every method trains the same network from the same initial weights, so a comparison of two runs
compares their methods.
"""

from importlib import import_module

from torch import nn

from fedsilo.core.errors import SettingError
from fedsilo.core.seeding import seed_generators
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.maths.dirichlet import Evidence
from fedsilo.models.networks.encoders import ConvEncoder, RowEncoder, VggEncoder
from fedsilo.models.networks.kinds import (
    AUTO_NETWORKS,
    IMAGE_NETWORKS,
    OWN_NETWORKS,
    ROW_NETWORKS,
    NetworkShape,
)
from fedsilo.models.networks.resnet22 import build_radiograph_classifier
from fedsilo.models.networks.site_network import TokenClassifier
from fedsilo.models.privacy.dp_sgd import with_group_norm
from fedsilo.models.tasks.task import Task, task_of


def build_classifier(
    settings: CommonSettings, shape: NetworkShape, task: Task | None = None
) -> TokenClassifier:
    """Build the network that the settings name, with initial weights drawn from the run's seed.

    If the task has its own builder (``Task.network``), that builder makes the network. For any
    other task, the loss is evidential in two cases: 'train.loss' is 'evidential', or it is 'auto'
    for a ViT whose task has an evidential loss. Otherwise the task's criterion is used. If training
    is private, group norm replaces batch norm.

    Args:
        settings: the run's common settings.
        shape: the input shape and the number of outputs.
        task: the task, with the scale of a numeric outcome. None means the task in ``settings``.

    Returns:
        The network in training mode. A network of a plugin or of timm is on the CPU. A ViT's
        backbone may still lack its pretrained weights, which ``load_backbone`` loads.

    Raises:
        SettingError: the network does not suit the kind of data, the images are too small for it,
            or a plugin's network cannot be built or used.
    """
    task = task or task_of(settings)
    if task.network:
        return _build_for_task(task, settings, shape)
    kind = network_kind(settings, shape)
    evidence = None
    is_auto = settings.loss == "auto" and kind == "vit" and "evidential" in task.losses
    if settings.loss == "evidential" or is_auto:
        evidence = Evidence(shape.outputs, settings.evidence)
    # Sites build their networks apart: only the seed makes their initial weights the same
    with seed_generators(settings.seed, "initial-weights"):
        if kind == "vit":
            # Imported here, because timm takes seconds to import
            from fedsilo.models.networks.prompted_vit import build_prompted_vit

            network: TokenClassifier = build_prompted_vit(settings, shape, evidence)
        elif kind == "resnet22":
            network = build_radiograph_classifier(settings, shape, evidence)
        elif kind in ("logistic", "mlp"):
            network = _row_classifier(kind, settings, shape, evidence)
        elif kind not in OWN_NETWORKS:
            from fedsilo.models.networks.plugged import build_plugged

            network = build_plugged(settings, shape, evidence)
        else:
            network = _image_classifier(kind, settings, shape, evidence)
        if evidence is None:
            network.criterion = task.criterion()
    if settings.is_private():
        with_group_norm(network)
    return network


def _build_for_task(task: Task, settings: CommonSettings, shape: NetworkShape) -> TokenClassifier:
    """Build the network of a task with its own builder, with initial weights drawn from the seed.

    ``task.network`` names the builder as ``module:function``, and its module is imported here. If
    training is private, group norm replaces batch norm.

    Raises:
        SettingError: the builder refuses the settings or the shape of the images.
    """
    module, _, name = task.network.partition(":")
    build = getattr(import_module(module), name)
    with seed_generators(settings.seed, "initial-weights"):
        network: TokenClassifier = build(settings, shape)
    if settings.is_private():
        with_group_norm(network)
    return network


def network_kind(settings: CommonSettings, shape: NetworkShape) -> str:
    """Return the name of the network that the run trains, such as ``conv``.

    'auto' becomes 'vgg16-bn' for the colour data sets in ``AUTO_NETWORKS``. For other data it
    becomes 'conv' for images and 'logistic' for a table. Whether a network of a plugin or of timm
    takes the data is not checked.

    Raises:
        SettingError: a built-in network for images is set but the data are a table, or the reverse.
    """
    networks: tuple[str, ...] = IMAGE_NETWORKS
    data = "images"
    if len(shape.input_shape) == 1:
        networks, data = ROW_NETWORKS, "a table"
    kind = settings.network
    if kind == "auto":
        kind = AUTO_NETWORKS.get(settings.dataset, networks[0])
    # The name of a plugin says nothing about its inputs; a trial batch checks it later
    if kind not in networks and settings.network in OWN_NETWORKS:
        raise SettingError(
            f"network '{kind}' does not take data set '{settings.dataset}', which is {data}: set "
            f"'network.name' to {' or '.join(networks)}"
        )
    return kind


def _image_classifier(
    kind: str, settings: CommonSettings, shape: NetworkShape, evidence: Evidence | None
) -> TokenClassifier:
    """Build an image classifier: a convolutional encoder, and a head with a hidden layer.

    The head flattens the encoder's last feature map. Its layers are dropout, a linear layer with as
    many units as the map has channels, GELU, dropout, and a linear layer to the outputs.

    Args:
        kind: 'conv' or 'vgg16-bn', the encoder.
        settings: the encoder's width in channels, the dropout rate and, for 'conv',
            'network.leading-norm'.
        shape: the shape of the images and the number of classes.
        evidence: turns logits into evidence for an evidential loss. None for cross-entropy.

    Raises:
        SettingError: the images are so small that the encoder leaves no feature map.
    """
    channels, height, width = shape.input_shape
    encoder: ConvEncoder | VggEncoder
    if kind == "conv":
        norm = settings.leading_norm
        encoder = ConvEncoder(in_channels=channels, width=settings.width, leading_norm=norm)
    else:
        encoder = VggEncoder(in_channels=channels, width=settings.width)
    # Each pooling rounds down, so the last map has this many places
    tokens = (height // encoder.stride) * (width // encoder.stride)
    if tokens == 0:
        raise SettingError(
            f"network '{kind}' divides images by {encoder.stride}, "
            f"which leaves nothing of {height}x{width} pixels: choose another 'network.name'"
        )
    hidden = encoder.channels
    head = nn.Sequential(
        nn.Dropout(settings.dropout),
        nn.Linear(tokens * hidden, hidden),
        nn.GELU(),
        nn.Dropout(settings.dropout),
        nn.Linear(hidden, shape.outputs),
    )
    return TokenClassifier(encoder, head, tokens=tokens, channels=hidden, evidence=evidence)


def _row_classifier(
    kind: str, settings: CommonSettings, shape: NetworkShape, evidence: Evidence | None
) -> TokenClassifier:
    """Build a classifier for table rows: 'mlp' with a hidden layer, or 'logistic' without one.

    The hidden layer has 'network.width' units. In front of the outputs, each network has dropout
    and a linear layer.

    Args:
        kind: 'mlp' or 'logistic'.
        settings: the width and the dropout rate.
        shape: the number of features and of outputs.
        evidence: turns outputs into evidence for an evidential loss. None for any other loss.
    """
    hidden = 0
    if kind == "mlp":
        hidden = settings.width
    encoder = RowEncoder(features=shape.input_shape[0], hidden=hidden)
    head = nn.Sequential(nn.Dropout(settings.dropout), nn.Linear(encoder.channels, shape.outputs))
    return TokenClassifier(encoder, head, tokens=1, channels=encoder.channels, evidence=evidence)
