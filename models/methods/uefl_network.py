"""UEFL's network, a classifier whose head reads codewords, and the metrics of its code use."""

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
        self.codebooks = nn.ParameterDict()
        for name in sorted(books, key=int):
            self.codebooks[name] = nn.Parameter(books[name].clone())
        self.settings = settings

    def _names(self) -> list[str]:
        """Return the books' numbers, ascending."""
        # As texts "10" would come before "2", and codes would change their meaning
        return sorted(self.codebooks, key=int)

    def codebook(self) -> Tensor:
        """Concatenate all books in the order of their numbers, (n, c / s)."""
        return torch.cat([self.codebooks[name] for name in self._names()])

    def books(self) -> dict[str, Tensor]:
        """Return the books by their wire names."""
        books: dict[str, Tensor] = {}
        for name in self._names():
            books[f"{CODEBOOK}{name}"] = self.codebooks[name].detach()
        return books

    def encode(self, inputs: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to tokens z (batch, l, c)."""
        tokens = self.classifier.encode(inputs)
        if self.settings.token_norm == "none":
            return tokens
        return nn.functional.layer_norm(tokens, tokens.shape[-1:])

    def nearest(self, tokens: Tensor) -> Discretised:
        """Replace tokens (batch, l, c) by the nearest codewords of this site, in float32."""
        # Distances in bf16 are so coarse that other codes would be chosen
        with torch.autocast(tokens.device.type, enabled=False):
            return nearest_codewords(tokens.float(), self.codebook(), self.settings.segments)

    def features(self, tokens: Tensor) -> Tensor:
        """Return codewords for ``tokens``, (batch, l, c), with the straight-through gradient."""
        return straight_through(tokens, self.nearest(tokens).codewords)

    def classify(self, features: Tensor) -> Tensor:
        """Map codewords (batch, l, c) to logits (batch, classes)."""
        return self.classifier.classify(features)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute eq. 7 for a batch: the criterion plus the codebook loss, a scalar."""
        tokens = self.encode(inputs)
        codewords = self.nearest(tokens).codewords
        logits = self.classify(straight_through(tokens, codewords))
        return self.classifier.criterion(logits, labels) + codebook_loss(
            tokens.float(), codewords, CODEBOOK_WEIGHT, COMMITMENT_WEIGHT
        )


class CodeUse:
    """Collects the perplexity of codes (eq. 11) and the distance of tokens to codewords (eq. 6)."""

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
        """Return ``perplexity``, ``codebook-loss`` and ``codeword-distance``, without weights."""
        distance = self.squared / self.elements
        return {
            "perplexity": perplexity(self.counts),
            "codeword-distance": distance,
            "codebook-loss": (CODEBOOK_WEIGHT + COMMITMENT_WEIGHT) * distance,
        }
