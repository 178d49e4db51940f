"""What a run needs to go on: the round state, and a site's reply as the methods see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import RecordDict

from fedsilo.models.contract.messages import ARRAYS, KEPT_STATE, METRICS, NUM_EXAMPLES
from fedsilo.strategies.wire.records import NDArray, unpack


@dataclass(frozen=True)
class RoundState:
    """The server's state after a round.

    Attributes:
        round: rounds finished; 0 before the first. arrays: the global arrays by name; empty where
        nothing is shared. extras: what else the method must remember, as JSON. stateful_sites:
        sites that have told that they keep private state of this run; the loop's own.
    """

    round: int
    arrays: Mapping[str, NDArray]
    extras: Mapping[str, Any] = field(default_factory=dict)
    stateful_sites: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArraySpec:
    """What a reply's array must be: of ``dtype`` and ``shape``, where None is any length."""

    shape: tuple[int | None, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class SiteReply:
    """A site's checked reply.

    ``agreed`` is what the site counts for by 'site-weights', None without.
    """

    site: str
    content: RecordDict
    bytes_down: int
    bytes_up: int
    agreed: int | None = None

    def array(self, name: str) -> NDArray:
        """Return the array ``name``."""
        return unpack(self.content.array_records[ARRAYS][name])

    def metric(self, key: str) -> float:
        """Return the metric ``key``."""
        return float(str(self.content.metric_records[METRICS][key]))

    def metrics(self) -> dict[str, float]:
        """Return all metrics."""
        told = self.content.metric_records[METRICS]  # Flower gathers the records at each look
        return {key: float(str(value)) for key, value in told.items()}

    def kept_state(self) -> bool:
        """Tell whether the site has stored private state for this phase."""
        return self.content.metric_records[METRICS].get(KEPT_STATE, 0) == 1

    def examples(self) -> int:
        """Return how many training samples the reply weighs: those agreed, or those it has."""
        return int(self.metric(NUM_EXAMPLES)) if self.agreed is None else self.agreed
