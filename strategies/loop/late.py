"""What is still under way when a round ends without all sites: who is at work, on what, till when.

It is part of the checkpoint, so that a resumed run asks for late replies again, by the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedsilo.models.contract.array_names import arrays_below, is_statistic
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Arrays, Reply

_SENT = "sent/"  # sent/<round>/<name>: what that round sent, in a checkpoint


@dataclass(frozen=True)
class Late:
    """What sites were at work on when a round ended."""

    now: float = 0.0  # the virtual clock's seconds by then; 0 in a deployment
    # By site, the round that asked it, and the clock's seconds at which it answers
    at_work: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    # By such a round, the arrays that it sent
    sent: Mapping[int, Arrays] = field(default_factory=dict)

    def stored(self) -> dict[str, NDArray]:
        """Return the arrays by the names that they have in a checkpoint."""
        sent = self.sent.items()
        return {f"{_SENT}{round_}/{n}": a for round_, arrays in sent for n, a in arrays.items()}

    def facts(self) -> dict[str, Any]:
        """Return all but the arrays, as JSON values."""
        return {"now": self.now, "at-work": dict(self.at_work)}

    @classmethod
    def restored(cls, arrays: dict[str, NDArray], facts: Mapping[str, Any]) -> Late:
        """Return what ``facts`` are of, and take its arrays out of ``arrays``."""
        at_work = {site: (int(r), float(due)) for site, (r, due) in facts["at-work"].items()}
        rounds = {round_ for round_, _ in at_work.values()}
        sent = {r: arrays_below(f"{_SENT}{r}/", arrays) for r in rounds}
        for name in [name for name in arrays if name.startswith(_SENT)]:
            del arrays[name]
        return cls(float(facts["now"]), at_work, sent)


def discounted(reply: Reply, then: Arrays, now: Arrays, staleness: int) -> Reply:
    """Return a reply to an earlier question as one to the present one, with less weight.

    Its update, the difference to what it was sent, counts (1 + staleness)^-0.5 times, as in FedBuff
    (Nguyen et al. 2022, algorithm 1 and its staleness scaling). Running statistics are not updates:
    they move that share of the way to the site's own, so that no variance falls below 0.

    Args:
        reply: its arrays.
        then: what the site was sent.
        now: what the round sends.
        staleness: s, rounds between the two.
    """
    weight, arrays = (1 + staleness) ** -0.5, dict(reply.arrays)
    for name in arrays.keys() & now.keys() & then.keys():
        start = now[name].astype(np.float64)
        towards = arrays[name] - (start if is_statistic(name) else then[name].astype(np.float64))
        arrays[name] = np.asarray(start + weight * towards, np.float32)
    return replace(reply, arrays=arrays)
