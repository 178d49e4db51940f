"""Each site's part in a phase: who is far beyond the others, how far all went and whither."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedsilo.models.contract.messages import EVALUATE
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.loop.state import RoundState, SiteReply
from fedsilo.strategies.loop.updates import in_kinds, update, update_norm
from fedsilo.strategies.wire.records import NDArray

_FEWEST = 3  # sites: of two no median tells which is odd


@dataclass(frozen=True)
class Contribution:
    """A site's part in a phase.

    Attributes:
        norm: L2 norm of the update of its weights.
        cosine: of the angle between that and what the model became; None where one is 0.
    """

    norm: float
    cosine: float | None


def far_out(
    method: Method, phase: str, state: RoundState, replies: Mapping[str, SiteReply]
) -> dict[str, str]:
    """Return the sites whose update is beyond 'max-update-norm', each with why, in one line."""
    limit, norms = method.common.max_update_norm, dict[str, dict[str, float]]()
    if not limit or phase == EVALUATE or len(replies) < _FEWEST:
        return {}
    for site, reply in replies.items():
        before = method.reference(phase, site, state)
        for kind, names in in_kinds(before).items():
            norms.setdefault(kind, {})[site] = update_norm(reply, before, names)
    found: dict[str, str] = {}
    for kind, of_sites in norms.items():
        median = float(np.median(list(of_sites.values())))
        for site, norm in of_sites.items():
            if len(of_sites) >= _FEWEST and median and norm > limit * median:
                found.setdefault(
                    site,
                    f"the update of its {kind} has norm {norm:.3g}, {norm / median:.3g} times the "
                    f"median, more than 'max-update-norm' ({limit:g})",
                )
    return found


def contributions(
    method: Method,
    phase: str,
    states: tuple[RoundState, RoundState],
    replies: Mapping[str, SiteReply],
) -> dict[str, Contribution]:
    """Return the contribution of each site whose reply was an update of what it was sent.

    ``states`` are those before and after the phase.
    """
    pairs = {
        site: (method.reference(phase, site, states[0]), method.reference(phase, site, states[1]))
        for site in replies
    }
    weights = {
        site: [name for name in in_kinds(before).get("weights", []) if name in after]
        for site, (before, after) in pairs.items()
    }
    sums = {site: np.zeros(3) for site, names in weights.items() if names}
    for name in sorted({name for names in weights.values() for name in names}):
        steps = _Steps()  # of one array: those that began alike became alike
        for site in sums:
            if name in weights[site]:
                before, after = (arrays[name] for arrays in pairs[site])
                sums[site] += _products(replies[site], name, before, *steps.of(before, after))
    return {site: _contribution(*products.tolist()) for site, products in sums.items()}


class _Steps:
    """What arrays became, each difference and its square computed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[NDArray, float]] = {}

    def of(self, before: NDArray, after: NDArray) -> tuple[NDArray, float]:
        """Return after - before, float64, and the sum of its squares."""
        key = id(before), id(after)
        if key not in self._known:
            step = after.astype(np.float64) - before
            self._known[key] = step, float(np.square(step).sum())
        return self._known[key]


def _products(
    reply: SiteReply, name: str, before: NDArray, step: NDArray, squared: float
) -> tuple[float, float, float]:
    """Return the sums of the update's squares, of the step's, and of their products."""
    own = update(reply, name, before)
    return float(np.square(own).sum()), squared, float((own * step).sum())


def _contribution(own: float, became: float, both: float) -> Contribution:
    norms = math.sqrt(own) * math.sqrt(became)
    return Contribution(math.sqrt(own), max(-1.0, min(1.0, both / norms)) if norms else None)
