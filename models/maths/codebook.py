"""The mathematics of a codebook: nearest codewords, straight-through gradient, loss, perplexity.

Equation numbers are those of UEFL (arXiv:2402.18888).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Discretised:
    """Tokens replaced by their nearest codewords.

    Attributes:
        codes: index of the codeword for each segment, (batch, l, s) int64.
        codewords: the codewords, segments joined, (batch, l, c).
    """

    codes: Tensor
    codewords: Tensor


def nearest_codewords(tokens: Tensor, codebook: Tensor, segments: int = 1) -> Discretised:
    """Replace each segment of each token by the nearest codeword in L2 (UEFL, eq. 4).

    A segment is one of ``segments`` equal parts of a token's c channels. If several codewords are
    equally near, the one with the lowest index is taken. The resulting codewords pass gradients to
    the codebook, but not to the tokens.

    Args:
        tokens: an encoder's output of l tokens per image, (batch, l, c).
        codebook: the n codewords, (n, c / segments), which all segments share.
        segments: the number of segments, which the caller must choose so that it divides c.

    Returns:
        The indices of the codewords, (batch, l, segments), and the codewords, joined to tokens
        again, (batch, l, c).
    """
    batch, length, channels = tokens.shape
    parts = tokens.reshape(-1, channels // segments)
    with torch.no_grad():
        # |z|^2 is the same for all codewords: the argmin needs only |c|^2 - 2 <z, c>
        squared = codebook.square().sum(dim=1) - 2 * parts @ codebook.T
        codes = squared.argmin(dim=1)
    return Discretised(
        codes=codes.reshape(batch, length, segments),
        codewords=codebook[codes].reshape(batch, length, channels),
    )


def straight_through(tokens: Tensor, codewords: Tensor) -> Tensor:
    """Return the values of ``codewords``, but pass their gradient to ``tokens`` unchanged."""
    # The argmin has no gradient, so the encoder takes the gradient of the codewords for its
    # own (Bengio et al. 2013). The codewords get no gradient here; only the codebook loss moves
    # them
    return tokens + (codewords - tokens).detach()


def codebook_loss(
    tokens: Tensor, codewords: Tensor, codebook_weight: float, commitment_weight: float
) -> Tensor:
    """Compute UEFL's codebook loss (eq. 6), a scalar, from tokens and their nearest codewords.

    The loss is a weighted sum of two terms. Each is the mean squared difference between ``tokens``
    and ``codewords``, tensors of the same shape. The codebook term, weighted by
    ``codebook_weight``, gives gradients only to the codewords. The commitment term, weighted by
    ``commitment_weight``, gives gradients only to the tokens.
    """
    # Each term moves one side only, because the other side is detached
    pull_codewords = nn.functional.mse_loss(codewords, tokens.detach())
    commit_tokens = nn.functional.mse_loss(tokens, codewords.detach())
    return codebook_weight * pull_codewords + commitment_weight * commit_tokens


def perplexity(counts: Tensor) -> float:
    """Compute the perplexity of codeword use (UEFL, eq. 11): the effective number of codewords.

    The perplexity is the exponential of the entropy in nats: 1 if one codeword is used, n if all
    are used equally.

    Args:
        counts: how often each codeword was used, (n,). At least one count must be above 0.
    """
    # entr(p) is -p ln p and 0 at p = 0, where p.log() would give NaN
    share = counts.double() / counts.sum()
    return math.exp(torch.special.entr(share).sum().item())
