"""Attention rollout (Abnar and Zuidema 2020), differentiable and batched, and its distillation.

FedEvPrompt (arXiv:2411.10071), eq. 7: the squared distance of a sample's map, at image resolution,
to the buffer's maps of its class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """Compute the attention weights of each head: the softmax of q k^T over the keys.

    Args:
        q: queries that are already scaled, (batch, heads, queries, c).
        k: keys, (batch, heads, keys, c).

    Returns:
        The weights, (batch, heads, queries, keys) float32.
    """
    # The softmax is computed in float32, because a rollout multiplies the attention of all layers,
    # and with it their rounding errors
    return (q @ k.transpose(-2, -1)).float().softmax(dim=-1)


class _MeanAttention(torch.autograd.Function):
    """The mean of ``attention_weights`` over the heads, which keeps only q and k for its gradient.

    Autograd would keep the attention of each head, the largest tensor of a layer, in all layers at
    once. Here the backward pass computes it again, one layer after the other.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> Tensor:
        """Return the mean over the heads, (batch, queries, keys) float32."""
        ctx.save_for_backward(q, k)
        return attention_weights(q, k).mean(dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradients for q and k, in the data types of q and k.

        The forward pass did not keep the attention, so it is computed again.
        """
        q, k = ctx.saved_tensors
        attention = attention_weights(q, k)
        # A softmax s with gradient g has the gradient s (g - sum(s g)) for its scores
        weighted = attention * (grads[0][:, None] / q.shape[1])
        scores = weighted - attention * weighted.sum(dim=-1, keepdim=True)
        scores = scores.to(q.dtype)
        return scores @ k, scores.transpose(-2, -1) @ q


def mean_attention(q: Tensor, k: Tensor) -> Tensor:
    """Compute attention weights, averaged over the heads, without keeping each head's weights.

    The attention of a head is the softmax of q k^T over the keys. The backward pass computes it
    again, which saves memory between the passes.

    Args:
        q: queries that are already scaled, (batch, heads, queries, c).
        k: keys, (batch, heads, keys, c).

    Returns:
        The mean attention, (batch, queries, keys) float32.
    """
    mean: Tensor = _MeanAttention.apply(q, k)
    return mean


def head_mean_without_prefix(attention: Tensor, prefix: int, renormalise: bool = True) -> Tensor:
    """Average a layer's attention over its heads, and drop the columns of the prompts.

    Prompts are trained keys and values that a layer puts in front of those of the tokens.

    Args:
        attention: (batch, heads, tokens, prefix + tokens), whose rows sum to 1.
        prefix: the number of prompts. Their columns come first.
        renormalise: whether each row is scaled to sum to 1 again without the prompts. A row of
            zeros then becomes uniform.

    Returns:
        The mean attention between tokens, (batch, tokens, tokens).
    """
    return without_prefix(attention.mean(dim=1), prefix, renormalise)


def without_prefix(attention: Tensor, prefix: int, renormalise: bool = True) -> Tensor:
    """Drop the prompts' columns from attention that is already averaged over its heads.

    Prompts are trained keys and values that a layer puts in front of those of the tokens.

    Args:
        attention: (batch, tokens, prefix + tokens), whose rows sum to 1.
        prefix: the number of prompts. Their columns come first.
        renormalise: whether each row is scaled to sum to 1 again. A row of zeros then becomes
            uniform. If False, a row lacks the share of the prompts.

    Returns:
        The mean attention between tokens, (batch, tokens, tokens).
    """
    kept = attention[..., prefix:]
    if renormalise:
        kept = _normalise_rows(kept)
    return kept


def rollout(attentions: Sequence[Tensor], prefix_tokens: int = 1) -> Tensor:
    """Compute attention rollout: how much the class token attends to each patch over all layers.

    The matrices (A + I) / 2 are multiplied, with the last layer's on the left. The identity I
    stands for the residual connection. The result is the class token's row of the product, without
    the prefix tokens and scaled to sum to 1. A row of zeros becomes uniform.

    Args:
        attentions: the attention A of each layer, first to last, (batch, tokens, tokens), with rows
            that sum to 1. There must be at least one layer.
        prefix_tokens: the number of tokens before the patches. The class token comes first, and
            register tokens may follow.

    Returns:
        The share of each patch, (batch, patches).
    """
    # Only the class token's row is needed. From the last layer backwards each layer then costs one
    # product of a vector and a matrix; the usual rollout multiplies two matrices
    row = torch.zeros_like(attentions[-1][:, :1])
    row[..., 0] = 1.0
    # A map has values of about 1/196, and bf16 with its three digits is too coarse for them
    with torch.autocast(row.device.type, enabled=False):
        for attention in reversed(attentions):
            row = (row @ attention + row) / 2
    return _normalise_rows(row[:, 0, prefix_tokens:])


def _normalise_rows(rows: Tensor) -> Tensor:
    """Scale rows (..., n) so that each sums to 1. A row of zeros becomes uniform."""
    # A row whose mass was all on the prompts would be 0 / 0; with this number it becomes uniform
    tiny = 1e-12
    return (rows + tiny) / (rows.sum(dim=-1, keepdim=True) + tiny * rows.shape[-1])


def upsampling_gram(grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Compute the matrix U^T U of a bilinear upsampling U, to compare maps without upsampling them.

    The squared length of a map a after upsampling is a^T U^T U a.

    Args:
        grid: (height, width) of a map before upsampling. Its cells are counted row by row.
        size: (height, width) after upsampling.

    Returns:
        The matrix, (cells, cells) float64.
    """
    # U is linear, so upsampling each unit vector gives the rows of U^T
    cells = grid[0] * grid[1]
    basis = torch.eye(cells, dtype=torch.float64).reshape(cells, 1, *grid)
    upsampled = torch.nn.functional.interpolate(
        basis, size=size, mode="bilinear", align_corners=False
    ).flatten(1)
    return upsampled @ upsampled.T


def scaled_maps(maps: Tensor, scale: str) -> Tensor:
    """Scale rollout maps for the distillation loss of FedEvPrompt (eq. 7).

    A rollout map says how much a network attends to each patch of an image.

    Args:
        maps: the maps, (..., cells), each of which sums to 1.
        scale: ``sum`` leaves the maps unchanged. ``byte`` makes the maximum of each map 255.
            ``max`` makes it 1, and so does any other name. If a maximum is 0, ``max`` and ``byte``
            give NaN.

    Returns:
        The scaled maps, (..., cells).
    """
    # The paper does not say the scale, but its lambda depends on the scale
    if scale == "sum":
        return maps
    scaled = maps / maps.amax(dim=-1, keepdim=True)
    if scale == "byte":
        scaled = scaled * 255
    return scaled


@dataclass(frozen=True)
class BufferMoments:
    """Summary of the other sites' maps per class, for the distillation loss; 0 without maps.

    Attributes:
        gram: U^T U, (cells, cells).
        counts: number of maps, (classes,).
        means: mean map, (classes, cells).
        spreads: mean of |U a|^2 minus |U mean|^2, (classes,).
    """

    gram: Tensor
    counts: Tensor
    means: Tensor
    spreads: Tensor

    def to(self, device: torch.device) -> BufferMoments:
        """Copy the moments to ``device`` as float32."""
        return BufferMoments(*(part.float().to(device) for part in vars(self).values()))


def buffer_moments(maps: Mapping[int, Tensor], classes: int, gram: Tensor) -> BufferMoments:
    """Summarise the rollout maps of other sites by class, for ``distillation_loss``.

    A rollout map says how much a network attends to each patch of an image. The loss needs three
    facts about each class: the number of maps, the mean map and the spread. The spread is the mean
    squared distance between a map and the mean map. A squared distance is a sum over the pixels of
    the upsampled maps. A class without maps gets 0 for all three.

    Args:
        maps: class -> maps (n, cells). A class may be missing or have no maps.
        classes: the number of classes.
        gram: U^T U, (cells, cells), from ``upsampling_gram``, where U upsamples a map to the
            image's resolution.

    Returns:
        The summary, in float64.
    """
    counts = torch.zeros(classes, dtype=torch.float64)
    means = torch.zeros(classes, len(gram), dtype=torch.float64)
    spreads = torch.zeros(classes, dtype=torch.float64)
    for label, class_maps in maps.items():
        if len(class_maps):
            # Maps of one class differ little, and float32 would round these differences away
            chosen = class_maps.double()
            counts[label] = len(chosen)
            means[label] = chosen.mean(dim=0)
            away = chosen - means[label]
            spreads[label] = ((away @ gram) * away).sum(dim=1).mean()
    return BufferMoments(gram.double(), counts, means, spreads)


def distillation_loss(
    maps: Tensor, labels: Tensor, moments: BufferMoments, per_site: int
) -> Tensor:
    """Compute FedEvPrompt's distillation loss (eq. 7), which pulls maps towards other sites' maps.

    A rollout map says how much a network attends to each patch of an image. A sample's loss sums
    the squared distances at image resolution between its map and the other sites' maps of its
    class, divided by ``per_site``. Without such maps the loss is 0, and the sample still counts in
    the mean.

    Args:
        maps: rollout maps of the batch, (batch, cells), which get gradients.
        labels: class of each sample, (batch,) int64.
        moments: the summary of the other sites' maps, from ``buffer_moments``.
        per_site: the largest number of maps per class that a site sends, M in the paper.

    Returns:
        The mean loss of the batch, a scalar.
    """
    # Upsampling U is linear, so |U(a - b)|^2 = (a - b)^T U^T U (a - b), and over n maps b_j
    #   sum_j |U(a - b_j)|^2 = n (|U(a - mean)|^2 + mean |U b_j|^2 - |U mean|^2).
    # No map is ever upsampled, and the cost of a step does not grow with the buffer.
    with torch.autocast(maps.device.type, enabled=False):
        away = maps.to(moments.means.dtype) - moments.means[labels]
        distances = ((away @ moments.gram) * away).sum(dim=1) + moments.spreads[labels]
    return (moments.counts[labels] / per_site * distances).mean()
