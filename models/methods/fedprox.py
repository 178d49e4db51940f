"""FedProx (Li et al. 2020): a proximal term that keeps local weights near the global ones.

Equations (arXiv:1812.06127):
  (objective) proximal term -> models.methods.fedprox.proximal_term
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsilo.core.settings.own_settings import OwnSettings
from fedsilo.core.settings_schema import setting


@dataclass(frozen=True)
class FedProxSettings(OwnSettings):
    """Settings of FedProx; mu 0, which is ``fedavg``, is not allowed."""

    title = "FedProx"
    server = "fedsilo.strategies.methods.fedavg:FedAvg"
    site = "fedsilo.client_app.methods.fedprox:FedProxSite"
    sums_suffice = True

    proximal_mu: float = setting(0.01, "weight mu of the proximal term", gt=0.0)


def proximal_term(mu: float, weights: Sequence[Tensor], anchors: Sequence[Tensor]) -> Tensor:
    """Compute FedProx's proximal term mu / 2 * |w - w_global|^2, a scalar.

    The squared length is summed over all tensors. ``weights`` w and ``anchors`` w_global have
    tensors of the same shapes in the same order.
    """
    squares = []
    for w, anchor in zip(weights, anchors, strict=True):
        squares.append((w - anchor).square().sum())
    return mu / 2 * torch.stack(squares).sum()


def linear_term(weights: Sequence[Tensor], slopes: Sequence[Tensor]) -> Tensor:
    """Compute the inner product of weights and slopes over all tensors, a scalar tensor.

    Its gradient for the weights is ``slopes``. If it is added to a loss, it adds ``slopes`` to the
    gradient. Both sequences have tensors of the same shapes in the same order, with at least one
    tensor.

    Raises:
        ValueError: the sequences have different lengths.
    """
    products = []
    for w, slope in zip(weights, slopes, strict=True):
        products.append((w * slope).sum())
    return torch.stack(products).sum()
