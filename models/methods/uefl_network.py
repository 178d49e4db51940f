"""UEFL's network: a classifier whose head reads codewords, and what is measured of its codes."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedsilo.models.maths.codebook import (
    Discretised,
    codebook_loss,
    nearest_codewords,
    perplexity,
    straight_through,
)
from fedsilo.models.methods.uefl import (
    CODEBOOK,
    CODEBOOK_WEIGHT,
    COMMITMENT_WEIGHT,
    UEFLSettings,
)
from fedsilo.models.networks.site_network import SiteNetwork, TokenClassifier


class UEFLNetwork(SiteNetwork):
    """A classifier whose head reads codewords; ``codebooks`` holds the books this site may use."""

    def __init__(
        self, classifier: TokenClassifier, books: Mapping[str, Tensor], settings: UEFLSettings
    ) -> None:
        super().__init__()
        self.classifier = classifier
        self.codebooks = nn.ParameterDict(
            {name: nn.Parameter(books[name].clone()) for name in sorted(books, key=int)}
        )
        self.settings = settings

    def _names(self) -> list[str]:
        return sorted(self.codebooks, key=int)

    def codebook(self) -> Tensor:
        """Return all books, concatenated in order, (n, c / s)."""
        return torch.cat([self.codebooks[name] for name in self._names()])

    def books(self) -> dict[str, Tensor]:
        """Return the books by the names of their arrays."""
        return {f"{CODEBOOK}{name}": self.codebooks[name].detach() for name in self._names()}

    def encode(self, inputs: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to tokens z (batch, l, c)."""
        tokens = self.classifier.encode(inputs)
        if self.settings.token_norm == "none":
            return tokens
        return nn.functional.layer_norm(tokens, tokens.shape[-1:])

    def nearest(self, tokens: Tensor) -> Discretised:
        """Return the nearest codewords of ``tokens`` in this site's books, in float32."""
        with torch.autocast(tokens.device.type, enabled=False):  # bf16 would choose other codes
            return nearest_codewords(tokens.float(), self.codebook(), self.settings.segments)

    def features(self, tokens: Tensor) -> Tensor:
        """Return the codewords in place of ``tokens``, (batch, l, c), straight-through."""
        return straight_through(tokens, self.nearest(tokens).codewords)

    def classify(self, features: Tensor) -> Tensor:
        """Map codewords (batch, l, c) to logits (batch, classes)."""
        return self.classifier.classify(features)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return eq. 7, the criterion and the codebook loss of a batch."""
        tokens = self.encode(inputs)
        codewords = self.nearest(tokens).codewords
        logits = self.classify(straight_through(tokens, codewords))
        return self.classifier.criterion(logits, labels) + codebook_loss(
            tokens.float(), codewords, CODEBOOK_WEIGHT, COMMITMENT_WEIGHT
        )


class CodeUse:
    """Code use as perplexity (eq. 11), and how far tokens are from their codewords (eq. 6)."""

    def __init__(self, network: UEFLNetwork) -> None:
        self.network = network
        self.counts = torch.zeros(len(network.codebook()), dtype=torch.int64)
        self.squared = 0.0
        self.elements = 0

    def see(self, tokens: Tensor) -> None:
        """Count the codes of a batch of tokens (batch, l, c)."""
        nearest = self.network.nearest(tokens)
        codes = nearest.codes.flatten().cpu()
        self.counts += torch.bincount(codes, minlength=len(self.counts))
        self.squared += float((nearest.codewords - tokens.float()).square().sum())
        self.elements += tokens.numel()

    def values(self) -> dict[str, float]:
        """Return ``perplexity``, ``codebook-loss`` and, without its weights, the distance."""
        distance = self.squared / self.elements
        return {
            "perplexity": perplexity(self.counts),
            "codeword-distance": distance,
            "codebook-loss": (CODEBOOK_WEIGHT + COMMITMENT_WEIGHT) * distance,
        }
