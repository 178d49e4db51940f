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
    """Compute the embedding of each input, without dropout.

    Args:
        network: on the compute device; it is put in eval mode.
        inputs: (n, ...), as a site stores them.
        compute: the device; the precision is always fp32.
        layer: ``embedding`` for the mean over the tokens (positions) that the encoder outputs.
            ``penultimate`` for the input of the head's last linear layer, or of the encoder's if
            the head has no linear layer.

    Returns:
        (n, c) float32 on the CPU, with c features per input.

    Raises:
        SettingError: the network has several classifiers, which do not share an embedding. Also
            raised if ``layer`` is ``penultimate`` and the network has no linear layer.
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
    return over_batches(network, inputs, exact, lambda x: _capture_input(linear[-1], network, x))


def penultimate(network: SiteNetwork, tokens: Tensor) -> Tensor:
    """Return the penultimate features: the input of the head's last linear layer.

    If the head has no linear layer, the features are the mean over the tokens instead. The same
    holds if that layer has more than 2,048 inputs. Dropout is off during the call. Gradients flow
    to ``tokens``.

    Args:
        network: on the compute device.
        tokens: the encoder's output (batch, l, c): l tokens with c features for each input.

    Returns:
        The features, (batch, features).

    Raises:
        SettingError: the network has several classifiers.
    """
    linear = _linear_layers(single_classifier(network).head)
    if not linear or linear[-1].in_features > _WIDEST:
        return tokens.mean(dim=1)
    with only_dropout_active(network, dropout=False):
        return _capture_input(linear[-1], lambda x: network.classify(network.features(x)), tokens)


def _linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def single_classifier(network: SiteNetwork) -> TokenClassifier:
    """Return the only ``TokenClassifier`` (an encoder with a head) in a network.

    The classifier is the network itself or one of its modules.

    Raises:
        SettingError: the network does not have exactly one such classifier.
    """
    classifiers = [part for part in network.modules() if isinstance(part, TokenClassifier)]
    if len(classifiers) != 1:
        raise SettingError(
            f"this model mixes {len(classifiers)} networks, which have no layer in common to look "
            "at: name a run of a method with one network, such as fedavg or local"
        )
    return classifiers[0]


def _capture_input(
    layer: nn.Linear, classify: Callable[[Tensor], Tensor], inputs: Tensor
) -> Tensor:
    """Return the input (batch, c) that a layer receives while ``classify(inputs)`` runs.

    If the layer is called several times, the input of its last call is returned.

    Args:
        layer: a linear layer of the network.
        classify: calls the network.
        inputs: the inputs of the network.

    Raises:
        IndexError: the layer is not called.
    """
    layer_inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: layer_inputs.append(inputs[0]))
    try:
        classify(inputs)
    finally:
        hook.remove()
    return layer_inputs[-1]
