"""A codebook's mathematics: nearest codewords, straight-through gradient, losses and code use.

Equation numbers are those of UEFL (arXiv:2402.18888).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Discretised:
    """Codes (batch, l, s) of the nearest codewords, and those codewords as (batch, l, c)."""

    codes: Tensor
    codewords: Tensor


def nearest_codewords(tokens: Tensor, codebook: Tensor, segments: int = 1) -> Discretised:
    """Replace each segment of tokens z (batch, l, c) by the nearest codeword in L2 (eq. 4).

    The codebook, (n, c / segments), is shared by all segments.
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
    """Return ``codewords`` in value; the gradient goes to ``tokens`` unchanged."""
    # The argmin has no gradient, so the encoder takes the one of the codewords for its own (Bengio
    # et al. 2013). The codewords get none here; only the codebook loss moves them
    return tokens + (codewords - tokens).detach()


def codebook_loss(
    tokens: Tensor, codewords: Tensor, codebook_weight: float, commitment_weight: float
) -> Tensor:
    """Return eq. 6, mean-reduced.

    The paper prints beta on the other term; VQ-VAE and the authors' code have it here.
    """
    pull_codewords = nn.functional.mse_loss(codewords, tokens.detach())
    commit_tokens = nn.functional.mse_loss(tokens, codewords.detach())
    return codebook_weight * pull_codewords + commitment_weight * commit_tokens


def perplexity(counts: Tensor) -> float:
    """Return the exponential of the entropy of code use (eq. 11); ``counts`` is (n,)."""
    share = counts.double() / counts.sum()
    return math.exp(torch.special.entr(share).sum().item())
