"""The usable replies of one phase, and how weights of sites become one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsilo.models.contract.settings import CommonSettings
from fedsilo.strategies.loop.robust import robust_mean
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Arrays, Reply


@dataclass
class Became:
    """What the arrays of which replies are updates were, and what they became in the round.

    Attributes:
        before: by site, what its reply is an update of.
        after: by name; a method that steps further than the mean puts its own arrays here.
    """

    before: Mapping[str, Arrays] = field(default_factory=dict)
    after: dict[str, NDArray] = field(default_factory=dict)


class Replies(dict[str, Reply]):
    """Replies by site, sorted.

    Attributes:
        became: what the round makes of them.
        sums: where weights were summed in secret, their mean by samples; the replies have none.
    """

    def __init__(
        self,
        replies: Mapping[str, Reply],
        became: Became | None = None,
        sums: Mapping[str, NDArray] | None = None,
    ) -> None:
        super().__init__(sorted(replies.items()))
        self.became = became or Became()
        self.sums = sums

    def of(self, sites: Iterable[str]) -> Replies:
        """Return the replies of ``sites``, as far as there are some."""
        wanted = set(sites)
        return Replies({s: r for s, r in self.items() if s in wanted}, self.became, self.sums)

    def average(
        self, common: CommonSettings, before: Arrays, equal: bool = False
    ) -> dict[str, NDArray]:
        """Return the arrays named in ``before``, which sites began with, combined; float32.

        By 'aggregation': the mean weighted by samples, with ``equal`` each site weighing the same,
        or one that a few sites cannot turn.

        Raises:
            SiteError: too few sites have answered for 'aggregation'.
        """
        if self.sums is not None:
            mean = {name: self.sums[name] for name in sorted(before)}
        elif common.aggregation == "mean":
            mean = weighted_mean(self, before, equal)
        else:
            mean = robust_mean(common, self, before, equal)
        self.became.after |= mean
        return mean


def weighted_mean(
    replies: Mapping[str, Reply], names: Iterable[str], equal: bool = False
) -> dict[str, NDArray]:
    """Return the weighted mean of the arrays ``names``, float32, of float64 sums in site order.

    Operation by operation it is Flower's ``aggregate_arrayrecords``: the same replies give the same
    bits in whatever order they came. An array is summed over the sites before the next is read, so
    that beside the mean there is never more than one array of one site in memory.
    """
    ordered = [reply for _, reply in sorted(replies.items())]
    weights = [1 if equal else reply.examples for reply in ordered]
    mean: dict[str, NDArray] = {}
    for name in sorted(names):
        total: Any = None
        for reply, weight in zip(ordered, weights, strict=True):
            part = reply.arrays[name].astype(np.float64) * (weight / sum(weights))
            total = part if total is None else total + part
        mean[name] = np.asarray(total).astype(np.float32)
    return mean
