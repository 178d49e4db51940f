"""What a run needs to go on after a round: the method's state, which is the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from fedsilo.models.contract.errors import CheckpointError
from fedsilo.strategies.wire.reply import Arrays


@dataclass(frozen=True)
class State:
    """A method's state after a round; a method that remembers more adds fields of JSON values.

    Attributes:
        arrays: the global arrays by name; empty where nothing is shared.
        round: rounds finished; 0 before the first.
        stateful_sites: sites that keep private state of this run, as the loop has seen.
    """

    arrays: Arrays = field(default_factory=dict)
    round: int = 0
    stateful_sites: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return all but the arrays, as JSON values."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _SHARED}
        return {"round": self.round, "extras": own, "keepers": list(self.stateful_sites)}

    @classmethod
    def restored(cls, arrays: Arrays, facts: Mapping[str, Any]) -> Self:
        """Return the state that ``facts`` and ``arrays`` were stored of.

        Raises:
            CheckpointError: they are another method's, or an earlier version's.
        """
        extras = dict(facts.get("extras", {}))
        own = {f.name for f in fields(cls)} - _SHARED
        if extras.keys() != own:
            raise CheckpointError(
                f"the stored state has {sorted(extras)} beside its arrays, not {sorted(own)}: it "
                "was made by another version of fedsilo; start a new run"
            )
        return cls(arrays, facts["round"], tuple(facts["keepers"]), **extras)


_SHARED = {"arrays", "round", "stateful_sites"}
