"""What a site's reply changes of what it was sent.

Weights and batch norm's running figures are measured apart: these are as large as pixels are.
Sums are numpy's own over float64, whose bits do not depend on threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from fedsilo.models.contract.array_names import is_statistic
from fedsilo.strategies.loop.state import SiteReply
from fedsilo.strategies.wire.records import NDArray

Arrays = Mapping[str, NDArray]


def update(reply: SiteReply, name: str, before: NDArray) -> NDArray:
    """Return what a reply changes of array ``name``, float64."""
    changed: NDArray = reply.array(name).astype(np.float64) - before
    return changed


def update_norm(reply: SiteReply, before: Arrays, names: Iterable[str]) -> float:
    """Return the L2 norm of the update of arrays ``names`` together."""
    squares = (float(np.square(update(reply, name, before[name])).sum()) for name in sorted(names))
    return math.sqrt(sum(squares))


def in_kinds(before: Arrays) -> dict[str, list[str]]:
    """Return the names of weights and of statistics, where there are some."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(before):
        kinds.setdefault("statistics" if is_statistic(name) else "weights", []).append(name)
    return kinds
