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
from fedsilo.models.networks.site_network import SiteNetwork, TokenClassifier, cross_entropies


class Codebooks(nn.ParameterDict):
    """Book number, as text -> codewords (n, c / s); it maps tokens to their nearest codewords.

    Args:
        books: the codewords of each book, which are copied.
        segments: s, the parts of a token that each have a codeword.
    """

    __call__ = nn.Module.__call__  # a ParameterDict refuses to be called

    def __init__(self, books: Mapping[str, Tensor], segments: int) -> None:
        super().__init__()
        self.segments = segments
        for name in sorted(books, key=int):
            self[name] = nn.Parameter(books[name].clone())

    def codewords(self) -> Tensor:
        """Concatenate all books in the order of their numbers, (n, c / s)."""
        # As texts "10" would come before "2", and codes would change their meaning
        return torch.cat([self[name] for name in sorted(self, key=int)])

    def nearest(self, tokens: Tensor) -> Discretised:
        """Replace tokens (batch, l, c) by the nearest codewords of all books, float32."""
        # Distances in bf16 are so coarse that other codes would be chosen
        with torch.autocast(tokens.device.type, enabled=False):
            return nearest_codewords(_precise(tokens), self.codewords(), self.segments)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, l, c) to their nearest codewords (batch, l, c), float32."""
        return self.nearest(tokens).codewords


class UEFLNetwork(SiteNetwork):
    """A classifier whose head reads codewords instead of the encoder's tokens.

    Attributes:
        codebooks: book number, as text -> codewords (n, c / s), for the books this site may use.
    """

    def __init__(
        self, classifier: TokenClassifier, books: Mapping[str, Tensor], settings: UEFLSettings
    ) -> None:
        super().__init__()
        self.classifier = classifier
        self.codebooks = Codebooks(books, settings.segments)
        self.settings = settings

    def codebook(self) -> Tensor:
        """Concatenate all books in the order of their numbers, (n, c / s)."""
        return self.codebooks.codewords()

    def books(self) -> dict[str, Tensor]:
        """Return the codewords of each codebook, in the order of the codebooks' numbers.

        The result maps ``codebook.<number>`` to codewords (n, length) without gradient. The
        length is that of one segment of a token.
        """
        books: dict[str, Tensor] = {}
        for name in sorted(self.codebooks, key=int):
            books[f"{CODEBOOK}{name}"] = self.codebooks[name].detach()
        return books

    def encode(self, inputs: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to tokens (batch, tokens, channels).

        If 'uefl.token-norm' is 'layer', each token is normalised over its channels, without trained
        weights. If it is 'none', the tokens stay unchanged.
        """
        tokens = self.classifier.encode(inputs)
        if self.settings.token_norm == "none":
            return tokens
        return nn.functional.layer_norm(tokens, tokens.shape[-1:])

    def nearest(self, tokens: Tensor) -> Discretised:
        """Replace tokens (batch, l, c) by the nearest codewords in this site's books, float32."""
        return self.codebooks.nearest(tokens)

    def features(self, tokens: Tensor) -> Tensor:
        """Return the nearest codewords of ``tokens``, (batch, l, c).

        The gradient of the codewords passes to the tokens unchanged (straight-through).
        """
        return straight_through(tokens, self.codebooks(tokens))

    def classify(self, features: Tensor) -> Tensor:
        """Map codewords (batch, l, c) to logits (batch, classes)."""
        return self.classifier.classify(features)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the training loss of a batch: the classification loss plus the codebook loss.

        The classifier reads each token's nearest codeword, and passes its gradient unchanged to the
        token. The codebook loss is the weighted squared error between tokens and codewords.
        """
        logits, tokens, codewords = self._quantise(inputs)
        return self.classifier.criterion(logits, labels) + _codebook_loss(tokens, codewords)

    def losses(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each sample, (batch,): its cross-entropy plus its codebook loss.

        The vectorised simulation needs it, because a batch there holds samples of several sites.
        The network's criterion is not used. If it is the plain cross-entropy without class weights,
        the mean of the result equals ``loss``.

        Args:
            inputs: (batch, *input_shape).
            labels: the class of each sample, (batch,).
        """
        logits, tokens, codewords = self._quantise(inputs)
        return cross_entropies(logits, labels) + torch.vmap(_codebook_loss)(tokens, codewords)

    def _quantise(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (batch, classes), tokens (batch, l, c) and their codewords."""
        tokens = self.encode(inputs)
        codewords = self.codebooks(tokens)
        return self.classify(straight_through(tokens, codewords)), _precise(tokens), codewords


def _precise(tokens: Tensor) -> Tensor:
    """Return tokens of half precision in float32, and other tokens unchanged."""
    return tokens.to(torch.promote_types(tokens.dtype, torch.float32))


def _codebook_loss(tokens: Tensor, codewords: Tensor) -> Tensor:
    return codebook_loss(tokens, codewords, CODEBOOK_WEIGHT, COMMITMENT_WEIGHT)


class CodeUse:
    """Measures code use over batches: perplexity (eq. 11) and distance to the codewords (eq. 6)."""

    def __init__(self, network: UEFLNetwork) -> None:
        self.network = network
        self.counts = torch.zeros(len(network.codebook()), dtype=torch.int64)
        self.squared = 0.0
        self.elements = 0

    def see(self, tokens: Tensor) -> None:
        """Add a batch of tokens (batch, tokens, channels) to the statistics of codeword use.

        Each segment of a token adds 1 to the count of its nearest codeword. The squared differences
        between tokens and codewords are summed, and the numbers behind this sum are counted.
        """
        nearest = self.network.nearest(tokens)
        codes = nearest.codes.flatten().cpu()
        self.counts += torch.bincount(codes, minlength=len(self.counts))
        self.squared += float((nearest.codewords - tokens.float()).square().sum())
        self.elements += tokens.numel()

    def values(self) -> dict[str, float]:
        """Return the metrics over all batches so far (at least one): name -> value.

        - ``codeword-distance``: the mean squared error between tokens and codewords.
        - ``codebook-loss``: the codebook's part of the training loss, 1.25 times this error.
        - ``perplexity``: the exponential of the entropy of the codewords' frequencies.
        """
        # Both terms of eq. 6 have this value; they differ only in their gradients and weights
        distance = self.squared / self.elements
        return {
            "perplexity": perplexity(self.counts),
            "codeword-distance": distance,
            "codebook-loss": (CODEBOOK_WEIGHT + COMMITMENT_WEIGHT) * distance,
        }
