"""Attention rollout (Abnar and Zuidema 2020), differentiable and batched, and its distillation.

FedEvPrompt (arXiv:2411.10071), eq. 7: the squared distance of a sample's map, at image resolution,
to the buffer's maps of its class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def head_mean_without_prefix(attention: Tensor, prefix: int, renormalise: bool = True) -> Tensor:
    """Average heads, drop the columns of the first ``prefix`` keys and renormalise rows.

    Maps (batch, heads, tokens, prefix + tokens) to (batch, tokens, tokens); rows sum to 1, or
    without ``renormalise`` to less by what was dropped, so that prompts get a gradient from it.
    """
    kept = attention.mean(dim=1)[..., prefix:]
    return _normalise_rows(kept) if renormalise else kept


def rollout(attentions: Sequence[Tensor], prefix_tokens: int = 1) -> Tensor:
    """Return the class token's attention to patches (batch, patches), summing to 1.

    It is the class token's row of the product of (A + I) / 2 over layers. ``attentions`` are, first
    layer to last, (batch, tokens, tokens); ``prefix_tokens`` is the number of class and register
    tokens, which precede the patches.
    """
    # Only the class token's row is wanted: from the last layer backwards it takes a product of a
    # vector and a matrix a layer, where the usual rollout multiplies matrices
    row = torch.zeros_like(attentions[-1][:, :1])
    row[..., 0] = 1.0
    with torch.autocast(row.device.type, enabled=False):  # bf16 is too coarse for maps of 1/196
        for attention in reversed(attentions):
            row = (row @ attention + row) / 2
    return _normalise_rows(row[:, 0, prefix_tokens:])


def _normalise_rows(rows: Tensor) -> Tensor:
    """Make rows (..., n) sum to 1; one whose mass was all on the prompts becomes uniform."""
    tiny = 1e-12
    return (rows + tiny) / (rows.sum(dim=-1, keepdim=True) + tiny * rows.shape[-1])


def upsampling_gram(grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Return U^T U of the bilinear upsampling U from ``grid`` to ``size``, float64.

    Both are (height, width); the result is (cells, cells), with the grid's cells row by row.
    """
    cells = grid[0] * grid[1]
    basis = torch.eye(cells, dtype=torch.float64).reshape(cells, 1, *grid)
    upsampled = torch.nn.functional.interpolate(
        basis, size=size, mode="bilinear", align_corners=False
    ).flatten(1)
    return upsampled @ upsampled.T


def scaled_maps(maps: Tensor, scale: str) -> Tensor:
    """Return maps (..., cells), which sum to 1, as they enter eq. 7.

    ``sum`` leaves them; ``max`` divides each by its maximum, as public code of rollouts does, and
    ``byte`` makes the maximum 255, as in a map that is stored as an image.
    """
    # The paper gives no scale, without which its lambda means little
    if scale == "sum":
        return maps
    return maps / maps.amax(dim=-1, keepdim=True) * (255 if scale == "byte" else 1)


@dataclass(frozen=True)
class BufferMoments:
    """What distillation needs of the other sites' maps; all are 0 for a class without maps."""

    gram: Tensor  # U^T U, (cells, cells)
    counts: Tensor  # (classes,) number of maps
    means: Tensor  # (classes, cells)
    spreads: Tensor  # (classes,) mean of |U a|^2, less |U mean|^2

    def to(self, device: torch.device) -> BufferMoments:
        """Return it in float32 on ``device``."""
        return BufferMoments(*(part.float().to(device) for part in vars(self).values()))


def buffer_moments(maps: Mapping[int, Tensor], classes: int, gram: Tensor) -> BufferMoments:
    """Return the moments, float64, of other sites' maps, (n, cells) by class.

    A class may be missing or empty; ``gram`` is U^T U.
    """
    counts = torch.zeros(classes, dtype=torch.float64)
    means = torch.zeros(classes, len(gram), dtype=torch.float64)
    spreads = torch.zeros(classes, dtype=torch.float64)
    for label, class_maps in maps.items():
        if len(class_maps):
            chosen = class_maps.double()  # a spread is small next to the squares it comes from
            counts[label] = len(chosen)
            means[label] = chosen.mean(dim=0)
            away = chosen - means[label]
            spreads[label] = ((away @ gram) * away).sum(dim=1).mean()
    return BufferMoments(gram.double(), counts, means, spreads)


def distillation_loss(
    maps: Tensor, labels: Tensor, moments: BufferMoments, per_site: int
) -> Tensor:
    """Return the batch mean of eq. 7.

    Args:
        maps: rollout maps a, (batch, cells).
        labels: (batch,) int64; each map is compared with those of its own class.
        moments: of the other sites' maps.
        per_site: M, the maps of a class that a site sends; the sum is divided by it.
    """
    # Upsampling U is linear, so |U(a - b)|^2 = (a - b)^T U^T U (a - b), and over n maps b_j
    #   sum_j |U(a - b_j)|^2 = n (|U(a - mean)|^2 + mean |U b_j|^2 - |U mean|^2).
    # No map is ever upsampled, and the cost of a step does not grow with the buffer.
    with torch.autocast(maps.device.type, enabled=False):
        away = maps.to(moments.means.dtype) - moments.means[labels]
        distances = ((away @ moments.gram) * away).sum(dim=1) + moments.spreads[labels]
    return (moments.counts[labels] / per_site * distances).mean()
