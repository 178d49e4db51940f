"""What a run starts from: a new network's exchanged arrays, or weights that its user names."""

from torch import nn

from fedsilo.datasets.weights.backbones import load_backbone
from fedsilo.datasets.weights.initial_weights import load_initial_weights
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.exchanged import exchanged_arrays
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.site_network import TokenClassifier
from fedsilo.strategies.wire.records import NDArray


def initial_weights(network: nn.Module) -> dict[str, NDArray]:
    """Return the exchanged arrays of a new network; for one seed the same for every method."""
    return {name: tensor.numpy() for name, tensor in exchanged_arrays(network).items()}


def starting_network(common: CommonSettings, task: Task) -> TokenClassifier:
    """Return the network that a run starts from; given weights only if they are exchanged.

    Raises:
        SettingError: its weights are missing or of another architecture.
    """
    network = build_classifier(common, task)
    if common.train_backbone or common.network == "resnet22":
        load_backbone(network, common)
    load_initial_weights(network, common)
    return network
