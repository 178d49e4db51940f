"""What a site trains and measures: any network, in three steps and a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn


class SiteNetwork(nn.Module, ABC):
    """A network as the training loop and the measuring see it: inputs, tokens, features, logits.

    ``encode`` makes tokens of inputs, which is what probes see and what prototypes and embeddings
    are means of. ``features`` makes of tokens what the classifier reads: the tokens as they are,
    unless a network puts something between (UEFL its codewords). ``classify`` makes logits of
    features. All dropout is in ``classify``, so that Monte Carlo dropout runs it alone anew.

    Attributes:
        views: how many rows of a layer's batch are of one sample, at most.
    """

    views: int = 1

    @abstractmethod
    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to tokens (batch, l, c)."""

    def features(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, l, c) to what the classifier reads: here the tokens as they are."""
        return tokens

    @abstractmethod
    def classify(self, features: Tensor) -> Tensor:
        """Map features (batch, ...) to logits (batch, classes); all dropout is here."""

    @abstractmethod
    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the training loss of a batch: inputs (batch, *input_shape), labels (batch,)."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to logits (batch, classes)."""
        return self.classify(self.features(self.encode(inputs)))
