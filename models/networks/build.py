"""Build the network that the settings name.

Every method trains the same network from the same initial weights, so that a comparison of two runs
compares their methods.
"""

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
    Task,
)
from fedsilo.models.networks.resnet22 import build_radiograph_classifier
from fedsilo.models.networks.site_network import TokenClassifier
from fedsilo.models.privacy.group_norm import with_group_norm


def build_classifier(settings: CommonSettings, task: Task) -> TokenClassifier:
    """Build the network of ``settings`` for ``task``, with initial weights keyed on the seed.

    If training is private per patient, group norm replaces batch norm.

    Raises:
        SettingError: the network does not take such data, the images are too small for it, or a
            plugin does not build a network.
    """
    network = _built(settings, task)
    if settings.is_private():
        with_group_norm(network)
    return network


def network_kind(settings: CommonSettings, task: Task) -> str:
    """Return the name of the network that ``settings.network`` means for ``task``.

    'auto' depends on the data. A plugin's network may take any data.

    Raises:
        SettingError: it is a network for images but the data are a table, or the other way round.
    """
    networks = ROW_NETWORKS if len(task.input_shape) == 1 else IMAGE_NETWORKS
    named = settings.network
    kind = AUTO_NETWORKS.get(settings.dataset, networks[0]) if named == "auto" else named
    if kind not in networks and named in OWN_NETWORKS:
        data = "a table" if networks is ROW_NETWORKS else "images"
        raise SettingError(
            f"network '{kind}' does not take data set '{settings.dataset}', which is {data}: set "
            f"'network.name' to {' or '.join(networks)}"
        )
    return kind


def _built(settings: CommonSettings, task: Task) -> TokenClassifier:
    kind = network_kind(settings, task)
    evidential = settings.loss == "evidential" or (settings.loss == "auto" and kind == "vit")
    evidence = Evidence(task.classes, settings.evidence) if evidential else None
    # Sites build their networks apart: only the seed makes their initial weights the same
    with seed_generators(settings.seed, "initial-weights"):
        if kind == "vit":
            # Imported here, because timm takes seconds to import
            from fedsilo.models.networks.prompted_vit import build_prompted_vit

            return build_prompted_vit(settings, task, evidence)
        if kind == "resnet22":
            return build_radiograph_classifier(settings, task, evidence)
        if kind in ("logistic", "mlp"):
            return _row_classifier(kind, settings, task, evidence)
        if kind not in OWN_NETWORKS:
            from fedsilo.models.networks.plugged import build_plugged

            return build_plugged(settings, task, evidence)
        channels, height, width = task.input_shape
        encoder: ConvEncoder | VggEncoder
        if kind == "conv":
            norm = settings.leading_norm
            encoder = ConvEncoder(in_channels=channels, width=settings.width, leading_norm=norm)
        else:
            encoder = VggEncoder(in_channels=channels, width=settings.width)
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
            nn.Linear(hidden, task.classes),
        )
        return TokenClassifier(encoder, head, tokens=tokens, channels=hidden, evidence=evidence)


def _row_classifier(
    kind: str, settings: CommonSettings, task: Task, evidence: Evidence | None
) -> TokenClassifier:
    hidden = settings.width if kind == "mlp" else 0
    encoder = RowEncoder(features=task.input_shape[0], hidden=hidden)
    head = nn.Sequential(nn.Dropout(settings.dropout), nn.Linear(encoder.channels, task.classes))
    return TokenClassifier(encoder, head, tokens=1, channels=encoder.channels, evidence=evidence)
