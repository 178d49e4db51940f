"""Each site's part in a phase: who is far beyond the others, how far all went and whither."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from models.contract.messages import EVALUATE
from strategies.loop.method import Method
from strategies.loop.state import RoundState, SiteReply
from strategies.loop.updates import Arrays, in_kinds, update, update_norm

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
    found = {}
    for site, reply in replies.items():
        before, after = (method.reference(phase, site, state) for state in states)
        names = [n for n in in_kinds(before).get("weights", []) if n in after]
        if names:
            found[site] = _contribution(reply, before, after, names)
    return found


def _contribution(
    reply: SiteReply, before: Arrays, after: Arrays, names: Iterable[str]
) -> Contribution:
    own = became = both = 0.0
    for name in names:
        one = update(reply, name, before[name])
        all_ = after[name].astype(np.float64) - before[name]
        own += float(np.square(one).sum())
        became += float(np.square(all_).sum())
        both += float((one * all_).sum())
    norms = math.sqrt(own) * math.sqrt(became)
    return Contribution(math.sqrt(own), max(-1.0, min(1.0, both / norms)) if norms else None)
