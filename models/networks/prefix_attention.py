"""Attention of a ViT's layer with prefix prompts, without and with the attention itself.

Without it, attention is always fused: PyTorch computes it in one kernel that never stores it.
"""

import torch
from timm.layers.attention import Attention
from torch import Tensor, nn

from fedsilo.models.maths.attention_rollout import attention_weights, mean_attention


def prefix_attention(
    layer: Attention, x: Tensor, prompts: Tensor | None, weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Apply a layer's attention, with trained prompts in front of its keys and values.

    The tokens attend to the prompts and to each other. Queries come only from the tokens, so the
    number of tokens stays the same.

    Args:
        layer: timm's attention.
        x: normalised tokens (batch, tokens, channels).
        prompts: keys and values (2, prompts, channels), or None for plain attention.
        weights: whether to return the attention weights. This is slower, because fused attention
            cannot be used.

    Returns:
        New tokens (batch, tokens, channels), and the attention weights (batch, heads, tokens,
        prompts + tokens) float32. The latter are None if ``weights`` is False.
    """
    q, k, v = _project_with_prefix(layer, x, prompts)
    attention = None
    if weights:
        attention = attention_weights(q * layer.scale, k)
        mixed = attention.to(v.dtype) @ v
    else:
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, scale=layer.scale)
    return _join_heads(layer, x, mixed), attention


def fused_prefix_attention(
    layer: Attention, x: Tensor, prompts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Apply a layer's attention with prompts, and return the mean attention weights over its heads.

    This takes little memory, because the weights of the single heads are never stored. The backward
    pass computes the mean again.

    Args:
        layer: timm's attention.
        x: normalised tokens (batch, tokens, channels).
        prompts: trained keys and values (2, prompts, channels) in front of those of the tokens, or
            None for plain attention.

    Returns:
        New tokens (batch, tokens, channels), and the mean attention weights (batch, tokens, prompts
        + tokens) float32.
    """
    q, k, v = _project_with_prefix(layer, x, prompts)
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, scale=layer.scale)
    return _join_heads(layer, x, mixed), mean_attention(q * layer.scale, k)


def _project_with_prefix(
    layer: Attention, x: Tensor, prompts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Project tokens to queries, keys and values, with the prompts before keys and values.

    ``x`` is (batch, tokens, channels), and ``prompts`` is (2, prompts, channels).

    Returns:
        Queries (batch, heads, tokens, head_dim), and keys and values (batch, heads, prompts +
        tokens, head_dim).
    """
    batch, tokens, _ = x.shape
    qkv = layer.qkv(x).reshape(batch, tokens, 3, layer.num_heads, layer.head_dim)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    q, k = layer.q_norm(q), layer.k_norm(k)
    if prompts is not None:
        # Prompts extend keys and values only. The sequence keeps its length, so every layer
        # can have its own prompts, and the position embeddings still fit the grid of patches
        heads = prompts.reshape(2, 1, -1, layer.num_heads, layer.head_dim).transpose(2, 3)
        prefix = heads.expand(-1, batch, -1, -1, -1).to(k.dtype)
        k, v = torch.cat([prefix[0], k], dim=2), torch.cat([prefix[1], v], dim=2)
    return q, k, v


def _join_heads(layer: Attention, x: Tensor, mixed: Tensor) -> Tensor:
    """Join the outputs of the attention heads, and project them to tokens.

    The result is (batch, tokens, channels). ``mixed`` has the heads' outputs (batch, heads, tokens,
    head_dim). ``x`` has the tokens that went into the attention, which a gated layer needs.
    """
    batch, tokens, _ = x.shape
    # (batch, heads, tokens, head_dim): without the transpose heads and tokens would be mixed up
    joined = layer.norm(mixed.transpose(1, 2).reshape(batch, tokens, -1))
    if layer.gate is not None:
        joined = joined * layer.gate(x).sigmoid()
    projected: Tensor = layer.proj_drop(layer.proj(joined))
    return projected
