"""The interface that every network at a site implements: three steps and a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn


class SiteNetwork(nn.Module, ABC):
    """A network as local training and evaluation see it: inputs, tokens, features, logits.

    Prototypes, embeddings and a method's own metrics read the tokens. All dropout is in
    ``classify``, so that Monte Carlo dropout encodes a batch once and repeats ``classify`` only.

    Attributes:
        views: the most rows of one layer's batch that can belong to one sample.
    """

    views: int = 1

    @abstractmethod
    def encode(self, inputs: Tensor) -> Tensor:
        """Map inputs (batch, *input_shape) to tokens (batch, l, c)."""

    def features(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, l, c) to what the classifier reads, by default the tokens."""
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
