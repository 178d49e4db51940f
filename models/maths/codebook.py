"""A codebook's mathematics: nearest codewords, straight-through gradient, losses and code use.

Equation numbers are those of UEFL (arXiv:2402.18888). Codewords by moving average are those of
VQ-VAE's appendix A.1 (van den Oord et al. 2017, arXiv:1711.00937).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

FloatArray = npt.NDArray[np.float32]


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


class MovingAverages:
    """Codewords as moving averages of the tokens that chose them (VQ-VAE, appendix A.1).

    For codeword i, N_i <- d N_i + (1 - d) n_i and m_i <- d m_i + (1 - d) sum z, over the n_i
    segments z of a batch that chose it; the codeword is m_i / N_i. It begins as one segment at the
    codeword itself, so that a codeword that no segment chooses stays where it is.

    Args:
        books: (n_b, c / s) each, in the order in which ``nearest_codewords`` numbers codewords.
        decay: d, from 0 up to below 1.
    """

    def __init__(self, books: Sequence[Tensor], decay: float) -> None:
        self.books = books
        self.decay = decay
        self.sums = torch.cat([book.detach() for book in books])
        self.counts = self.sums.new_ones(len(self.sums))

    @torch.no_grad()
    def update(self, tokens: Tensor, codes: Tensor) -> None:
        """Move the codewords, in place, towards tokens (batch, l, c) with codes (batch, l, s)."""
        segments = tokens.reshape(-1, self.sums.shape[1])
        chosen = nn.functional.one_hot(codes.flatten(), len(self.counts)).to(segments.dtype)
        self.counts.lerp_(chosen.sum(dim=0), 1 - self.decay)
        self.sums.lerp_(chosen.T @ segments, 1 - self.decay)
        means = torch.where(
            chosen.any(dim=0)[:, None], self.sums / self.counts[:, None], torch.cat([*self.books])
        )
        parts = torch.split(means, [len(book) for book in self.books])
        for book, part in zip(self.books, parts, strict=True):
            book.copy_(part)


def split_most_used(book: FloatArray, use: FloatArray, seed: int) -> FloatArray:
    """Return ``book`` (n, d) with each unused codeword moved next to the most used one.

    As Linde, Buzo and Gray (1980) split codewords: the two share the use, (n,), of the one, and the
    moved one differs by a hundredth of the book's spread in a random direction.
    """
    book, left = book.copy(), use.astype(np.float64)
    if not left.any():
        return book
    rng = np.random.default_rng(seed)
    spread = 0.01 * float(book[use > 0].std())
    for dead in np.flatnonzero(use == 0):
        most = int(left.argmax())
        book[dead] = book[most] + spread * rng.standard_normal(book.shape[1])
        left[most] = left[dead] = left[most] / 2
    return book
