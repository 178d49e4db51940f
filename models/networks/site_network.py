"""A site's networks: their interface, the token classifier that most are, and what sites exchange.

Sites exchange the floating-point arrays of a network outside its frozen parts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedsilo.core.errors import SettingError
from fedsilo.models.maths.dirichlet import Evidence


class SiteNetwork(nn.Module, ABC):
    """A network in three steps: ``encode``, ``features`` and ``classify``.

    They map inputs to tokens, tokens to features, and features to logits. Prototypes, embeddings
    and a method's own metrics read the tokens. All dropout must be in ``classify``, because Monte
    Carlo dropout encodes a batch once and repeats only ``classify``.

    Attributes:
        views: the most rows in one layer's batch that can belong to the same sample.
        has_dropout: whether ``classify`` may draw dropout masks. Without them one Monte Carlo pass
            is enough.
    """

    views: int = 1
    has_dropout: bool = True

    @abstractmethod
    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to tokens (batch, l, c)."""

    def features(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, l, c) to the input of ``classify``; by default they are unchanged."""
        return tokens

    @abstractmethod
    def classify(self, features: Tensor) -> Tensor:
        """Map features (batch, ...) to logits (batch, classes)."""

    @abstractmethod
    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the training loss, a scalar, of inputs (batch, ...) and labels (batch,)."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to logits (batch, classes)."""
        return self.classify(self.features(self.encode(inputs)))


class TokenClassifier(SiteNetwork):
    """An encoder and a head; the network is evidential if ``evidence`` is given.

    Args:
        encoder: maps inputs to maps (batch, channels, rows, columns).
        head: maps flattened tokens (batch, tokens * channels) to outputs; it has all dropout.
        tokens: l, the number of places in a map.
        channels: c, the length of a token.
        evidence: turns the head's outputs into log alpha.

    Attributes:
        criterion: the mean loss of logits (batch, classes) and labels (batch,): cross-entropy, or
            the evidential loss.
    """

    criterion: Callable[[Tensor, Tensor], Tensor]

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
        self.criterion = nn.functional.cross_entropy
        if evidence:
            self.criterion = evidence.loss

    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to tokens z (batch, l, c)."""
        # (batch, c, rows, columns): each place becomes a token, hence the channels go last
        maps: Tensor = self.encoder(inputs)
        return maps.flatten(2).transpose(1, 2)

    def encode_with_map(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Map inputs to tokens (batch, l, c) and the last feature map (batch, rows, columns, c)."""
        maps: Tensor = self.encoder(inputs)
        return maps.flatten(2).transpose(1, 2), maps.permute(0, 2, 3, 1)

    def classify(self, features: Tensor) -> Tensor:
        """Map features (batch, tokens, channels) to logits (batch, classes).

        The head reads a sample's features as one vector. If the loss is evidential, the logits are
        the logarithms of the parameters of a Dirichlet distribution. The softmax of the logits
        gives class probabilities for every loss.
        """
        logits: Tensor = self.head(features.flatten(1))
        if self.evidence:
            logits = self.evidence(logits)
        return logits

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute ``criterion``, a scalar, for inputs (batch, *input_shape) and labels (batch,)."""
        return self.criterion(self(inputs), labels)

    def losses(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the cross-entropy of each sample, (batch,).

        The vectorised simulation needs it, because a batch there holds samples of several sites.
        The network's criterion is not used. If the criterion is the plain cross-entropy without
        class weights, the mean of the result equals ``loss``.

        Args:
            inputs: (batch, *input_shape).
            labels: the class of each sample, (batch,).
        """
        return cross_entropies(self(inputs), labels)


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the cross-entropy of each sample (batch,), from logits (batch, classes)."""
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def evidences(module: nn.Module) -> list[Evidence]:
    """Return all ``Evidence`` modules inside ``module``; empty for a network without evidence."""
    return [part for part in module.modules() if isinstance(part, Evidence)]


class FrozenPart(nn.Module):
    """Base of modules with pretrained weights that every site has and no site trains or sends."""


@contextmanager
def frozen_weights_in(module: nn.Module, kind: torch.dtype) -> Iterator[None]:
    """Keep the weights of frozen layers in autocast's type ``kind`` during a ``with`` block.

    Autocast would convert these weights in each step, and a single conversion saves time. The
    frozen layers are the linear layers and 2D convolutions inside a ``FrozenPart``, a part that is
    not trained. Afterwards the weights have their exact values again. The block must run the
    network under autocast. Otherwise inputs and weights differ in type.

    Args:
        module: the network.
        kind: the type of autocast, bfloat16 or float16.
    """
    converted: list[tuple[nn.Parameter, Tensor]] = []
    for frozen in module.modules():
        if not isinstance(frozen, FrozenPart):
            continue
        for layer in frozen.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                converted += [(weight, weight.data) for weight in layer.parameters(recurse=False)]
    # Nothing is converted before the list is complete: a weight that two modules share is in it
    # twice, and its second entry must have the exact values too
    try:
        for weight, exact in converted:
            weight.data = exact.to(kind)
        yield
    finally:
        for weight, exact in converted:
            weight.data = exact


def exchanged_arrays(module: nn.Module) -> dict[str, Tensor]:
    """Return the arrays that sites exchange: array name -> array, sorted by name.

    These are the parameters and the floating-point buffers in the state dict of ``module``. Arrays
    inside a ``FrozenPart``, a part that is not trained, are left out. Integer buffers, the step
    counters of batch norms, are left out too.

    The arrays share memory with ``module``, so changing an array changes the network.
    """
    frozen: tuple[str, ...] = ()
    for name, part in module.named_modules():
        if isinstance(part, FrozenPart):
            # The '.' ends the name of the part: without it "head" would freeze "head2" as well
            frozen += (f"{name}.",)
    exchanged: dict[str, Tensor] = {}
    for name, array in sorted(module.state_dict().items()):
        if array.is_floating_point() and not name.startswith(frozen):
            exchanged[name] = array
    return exchanged


def load_exchanged(module: nn.Module, arrays: dict[str, Tensor]) -> None:
    """Copy ``arrays`` into ``module`` in place, either all of them or none.

    Values are converted to the type and device of the network. They are not checked to be finite.

    Raises:
        SettingError: an array is missing, unknown, or has another shape than in ``module``.
    """
    targets = exchanged_arrays(module)
    if arrays.keys() != targets.keys():
        missing = _list_names(targets.keys() - arrays.keys())
        surplus = _list_names(arrays.keys() - targets.keys())
        raise SettingError(f"weights do not fit the network: missing {missing}, surplus {surplus}")
    for name, target in targets.items():
        if arrays[name].shape != target.shape:
            raise SettingError(
                f"weights do not fit the network: '{name}' is {tuple(arrays[name].shape)}, "
                f"not {tuple(target.shape)}"
            )
    # The arrays are copied in place: an optimiser keeps its references to the parameters
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(arrays[name])


def _list_names(names: Set[str]) -> str:
    """List the first three of ``names`` and say how many more there are, for errors."""
    text = f"{sorted(names)[:3]}"
    if len(names) > 3:
        text += f" and {len(names) - 3} more"
    return text


def last_layers(module: nn.Module, count: int) -> list[str]:
    """Return the names of the arrays that sites exchange from the last ``count`` trainable layers.

    A layer is a module that has trainable parameters itself, not only in its submodules. Layers are
    in the order of ``named_modules``. Sites exchange a layer's parameters and its floating-point
    buffers, such as running means. Arrays inside a ``FrozenPart`` are not exchanged.

    Args:
        module: the network.
        count: the number of layers, at least 1. If there are fewer layers, all are taken.
    """
    layers = []
    for name, part in module.named_modules():
        # Without the parameters of its sublayers, so that a container is not a layer
        if any(parameter.requires_grad for parameter in part.parameters(recurse=False)):
            layers.append(name)
    return _below(module, layers[-count:])


def batch_norms(module: nn.Module) -> list[str]:
    """Return the names of all batch norms' exchanged arrays: weights and running statistics."""
    # The common base of all batch norms; torch's own checks use this private name too
    kinds = nn.modules.batchnorm._BatchNorm
    norms = [name for name, part in module.named_modules() if isinstance(part, kinds)]
    return _below(module, norms)


def _below(module: nn.Module, parts: list[str]) -> list[str]:
    """Return the names of the exchanged arrays that belong directly to one of ``parts``."""
    return [name for name in exchanged_arrays(module) if name.rpartition(".")[0] in parts]
