"""How far, and in which direction, each reply is from what its site was sent; who is far out.

Weights and batch norm's running statistics are measured apart: these are as large as pixels are.
Sums are numpy's own over float64, whose bits do not depend on threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fedsilo.models.contract.array_names import is_statistic
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Arrays, Reply

_FEWEST = 3  # sites: of two no median tells which is odd


@dataclass(frozen=True)
class UpdateStatistics:
    """A site's part in a phase.

    Attributes:
        norm: L2 norm of the update of its weights.
        cosine: of the angle between that and what the model became; None where one is 0.
    """

    norm: float
    cosine: float | None


def update_norm(reply: Reply, before: Arrays, names: Iterable[str]) -> float:
    """Return the L2 norm of what a reply changes of the arrays ``names`` together."""
    squares = (
        float(np.square(reply.arrays[name].astype(np.float64) - before[name]).sum())
        for name in sorted(names)
    )
    return math.sqrt(sum(squares))


def in_kinds(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of weights and of statistics, where there are some."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(names):
        kinds.setdefault("statistics" if is_statistic(name) else "weights", []).append(name)
    return kinds


def far_out(
    limit: float, before: Mapping[str, Arrays], replies: Mapping[str, Reply]
) -> dict[str, str]:
    """Return the sites whose update is longer than ``limit`` medians, each with why, in one line.

    ``before`` has by site what its reply is an update of.
    """
    norms: dict[str, dict[str, float]] = {}
    for site, reply in replies.items():
        for kind, names in in_kinds(before.get(site, ())).items():
            norms.setdefault(kind, {})[site] = update_norm(reply, before[site], names)
    found: dict[str, str] = {}
    for kind, by_site in norms.items():
        median = float(np.median(list(by_site.values())))
        for site, norm in by_site.items():
            if len(by_site) >= _FEWEST and median and norm > limit * median:
                found.setdefault(
                    site,
                    f"the update of its {kind} has norm {norm:.3g}, {norm / median:.3g} times the "
                    f"median, more than 'max-update-norm' ({limit:g})",
                )
    return found


def update_statistics(
    before: Mapping[str, Arrays], after: Arrays, replies: Mapping[str, Reply]
) -> dict[str, UpdateStatistics]:
    """Return the statistics of each site whose reply was an update of weights that it was sent.

    ``before`` has by site what its reply is an update of, ``after`` what that became.
    """
    weights = {
        site: [n for n in before.get(site, ()) if n in after and not is_statistic(n)]
        for site in replies
    }
    sums = {site: np.zeros(3) for site, names in weights.items() if names}
    for name in sorted({name for names in weights.values() for name in names}):
        steps: dict[int, tuple[NDArray, float]] = {}  # of one array: most sites began alike
        for site in (site for site in sums if name in weights[site]):
            array = before[site][name]
            if id(array) not in steps:
                step = after[name].astype(np.float64) - array
                steps[id(array)] = step, float(np.square(step).sum())
            step, squared = steps[id(array)]
            own = replies[site].arrays[name].astype(np.float64) - array
            sums[site] += float(np.square(own).sum()), squared, float((own * step).sum())
    return {site: _statistics(*products.tolist()) for site, products in sums.items()}


def _statistics(own: float, became: float, both: float) -> UpdateStatistics:
    norms = math.sqrt(own) * math.sqrt(became)
    cosine = max(-1.0, min(1.0, both / norms)) if norms else None
    return UpdateStatistics(math.sqrt(own), cosine)
