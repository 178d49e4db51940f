"""Compute a network's embeddings of samples, at the hospital that has the samples."""

from collections.abc import Callable

from torch import Tensor, nn

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.evaluation import over_batches
from fedsilo.core.errors import SettingError
from fedsilo.models.maths.mc_dropout import only_dropout_active
from fedsilo.models.networks.site_network import SiteNetwork, TokenClassifier

EMBEDDING, PENULTIMATE = "embedding", "penultimate"
LAYERS = (EMBEDDING, PENULTIMATE)
_WIDEST = 2048  # features; a covariance matrix of this width is inverted within a second


def embed(network: SiteNetwork, inputs: Tensor, compute: Compute, layer: str = EMBEDDING) -> Tensor:
    """Compute the embeddings (n, c) of inputs (n, ...), in eval mode, float32 on the CPU.

    Args:
        network: placed on the compute device.
        inputs: as a silo stores them.
        compute: the device; the precision is always fp32.
        layer: ``embedding`` for the mean of the encoder's tokens, ``penultimate`` for the input of
            the head's last linear layer.

    Raises:
        SettingError: the network mixes several, which have no common embedding.
    """
    exact = compute.exact()
    classifier = single_classifier(network)
    if layer == EMBEDDING:
        return over_batches(network, inputs, exact, lambda x: network.encode(x).mean(dim=1))
    # A plugin's head may be inside its encoder
    linear = _linear_layers(classifier.encoder) + _linear_layers(classifier.head)
    if not linear:
        raise SettingError(
            "this network has no linear layer, and so no embeddings 'penultimate': choose --layer "
            "embedding"
        )
    return over_batches(network, inputs, exact, lambda x: _input_of(linear[-1], network, x))


def penultimate(network: SiteNetwork, tokens: Tensor) -> Tensor:
    """Return the input (batch, c) of the last linear layer after the encoder, without dropout.

    If there is no such layer, for example because the head is inside the encoder, or if it is wider
    than 2,048, return the mean token. Dropout layers stay as they were, and no random number is
    drawn.

    Args:
        network: on the compute device.
        tokens: the encoder's tokens, (batch, l, c).

    Raises:
        SettingError: the network mixes several.
    """
    linear = _linear_layers(single_classifier(network).head)
    if not linear or linear[-1].in_features > _WIDEST:
        return tokens.mean(dim=1)
    with only_dropout_active(network, dropout=False):
        return _input_of(linear[-1], lambda x: network.classify(network.features(x)), tokens)


def _linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def single_classifier(network: SiteNetwork) -> TokenClassifier:
    """Return the classifier that a method's network is or wraps.

    Raises:
        SettingError: the network mixes several classifiers.
    """
    classifiers = [part for part in network.modules() if isinstance(part, TokenClassifier)]
    if len(classifiers) != 1:
        raise SettingError(
            f"this model mixes {len(classifiers)} networks, which have no layer in common to look "
            "at: name a run of a method with one network, such as fedavg or local"
        )
    return classifiers[0]


def _input_of(layer: nn.Linear, classify: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Return the input (batch, c) that ``layer`` receives while ``inputs`` are classified."""
    layer_inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: layer_inputs.append(inputs[0]))
    try:
        classify(inputs)
    finally:
        hook.remove()
    return layer_inputs[-1]
