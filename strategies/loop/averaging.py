"""Weighted means of site arrays by the arithmetic of Flower's FedAvg, in float64 and site order.

An array is summed up over the sites before the next is read: beside the mean there is never more
than one array of one site in memory, however many sites there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from strategies.loop.state import SiteReply
from strategies.wire.records import NDArray


def weighted_mean(
    replies: Mapping[str, SiteReply], names: Iterable[str], equal: bool = False
) -> dict[str, NDArray]:
    """Return the n_k-weighted mean of the arrays ``names`` over ``replies``, float32.

    With ``equal`` each site weighs the same, however many samples it has.

    Operation by operation it is Flower's ``aggregate_arrayrecords`` over float64 copies, sorted by
    site: the same replies give the same bits whatever order they came in.
    """
    ordered = [reply for _, reply in sorted(replies.items())]
    shares = weights_of(ordered, equal)
    return {name: _weighted_sum(ordered, shares, name) for name in sorted(names)}


def weights_of(replies: Iterable[SiteReply], equal: bool = False) -> list[float]:
    """Return what each reply weighs, 1 in all: its share of the samples, or with ``equal`` 1/n."""
    weights = [1 if equal else reply.examples() for reply in replies]
    total = sum(weights)
    return [weight / total for weight in weights]


def _weighted_sum(replies: Iterable[SiteReply], weights: Iterable[float], name: str) -> NDArray:
    total: Any = None
    for reply, weight in zip(replies, weights, strict=True):
        part = reply.array(name).astype(np.float64) * weight
        if total is None:
            total = part
        else:
            total += part
    mean: NDArray = np.asarray(total).astype(np.float32)
    return mean
