"""Weighted means of site arrays by the arithmetic of Flower's FedAvg, in float64 and site order.

An array is summed up over the sites before the next is read: beside the mean there is never more
than one array of one site in memory, however many sites there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedsilo.strategies.loop.state import SiteReply
from fedsilo.strategies.wire.records import NDArray


class SummedReplies(dict[str, SiteReply]):
    """Replies without arrays, and the mean of those, which is all that anybody knows of them.

    Attributes:
        mean: by name, float32.
    """

    def __init__(self, replies: Mapping[str, SiteReply], mean: Mapping[str, NDArray]) -> None:
        super().__init__(replies)
        self.mean = dict(mean)


def weighted_mean(
    replies: Mapping[str, SiteReply], names: Iterable[str], equal: bool = False
) -> dict[str, NDArray]:
    """Return the n_k-weighted mean of the arrays ``names`` over ``replies``, float32.

    With ``equal`` each site weighs the same, however many samples it has.

    Operation by operation it is Flower's ``aggregate_arrayrecords`` over float64 copies, sorted by
    site: the same replies give the same bits whatever order they came in. Of replies that were
    summed in secret the mean is known already, by samples.
    """
    if isinstance(replies, SummedReplies):
        return {name: replies.mean[name] for name in sorted(names)}
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
