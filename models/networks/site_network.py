"""The interface of every network at a site, and the token classifier that most networks are."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from fedsilo.models.maths.dirichlet import Evidence


class SiteNetwork(nn.Module, ABC):
    """A network in four steps: inputs, tokens, features, logits.

    Prototypes, embeddings and a method's own metrics read the tokens. All dropout must be in
    ``classify``, because Monte Carlo dropout encodes a batch once and repeats only ``classify``.

    Attributes:
        views: the most rows in one layer's batch that can belong to the same sample.
    """

    views: int = 1

    @abstractmethod
    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to tokens (batch, l, c)."""

    def features(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, l, c) to the input of ``classify``; here the tokens themselves."""
        return tokens

    @abstractmethod
    def classify(self, features: Tensor) -> Tensor:
        """Map features (batch, ...) to logits (batch, classes)."""

    @abstractmethod
    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the training loss of inputs (batch, *input_shape) and labels (batch,)."""

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
        self.criterion = evidence.loss if evidence else nn.functional.cross_entropy

    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to tokens z (batch, l, c)."""
        # (batch, c, rows, columns): each place becomes a token, hence the channels go last
        maps: Tensor = self.encoder(inputs)
        return maps.flatten(2).transpose(1, 2)

    def encode_with_map(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens (batch, l, c) and the last feature map (batch, rows, columns, c)."""
        maps: Tensor = self.encoder(inputs)
        return maps.flatten(2).transpose(1, 2), maps.permute(0, 2, 3, 1)

    def classify(self, features: Tensor) -> Tensor:
        """Map features (batch, l, c) to logits (batch, classes).

        The logits of an evidential network are log alpha. Their softmax, alpha / S, is the expected
        class probability, so that callers treat both kinds of network alike.
        """
        logits: Tensor = self.head(features.flatten(1))
        return self.evidence(logits) if self.evidence else logits

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the criterion for a batch: inputs (batch, *input_shape) and labels (batch,)."""
        return self.criterion(self(inputs), labels)


def evidences(module: nn.Module) -> list[Evidence]:
    """Return every ``Evidence`` in ``module``; empty if the module is not evidential."""
    return [part for part in module.modules() if isinstance(part, Evidence)]
