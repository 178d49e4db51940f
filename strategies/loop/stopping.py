"""Why a run ends before its last round, where a hook says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedsilo.models.contract.errors import SiteError
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.state import RoundState

Ahead = Callable[[RoundState], Mapping[str, int]]


class Stop:
    """Asks the hooks, before each round and after one that failed.

    Attributes:
        reason: the hook's sentence; empty while the run goes on.
    """

    def __init__(self, hooks: Sequence[Hook], ahead: Ahead) -> None:
        self.hooks = hooks
        self.ahead = ahead
        self.reason = ""

    def due(self, state: RoundState) -> bool:
        """Ask the hooks whether another round may follow ``state``."""
        for hook in self.hooks:
            self.reason = self.reason or hook.why_stop(state, lambda: self.ahead(state)) or ""
        return bool(self.reason)

    def ends_well(self, state: RoundState, error: SiteError) -> bool:
        """Tell whether a hook takes the round that failed by ``error`` as the end, at ``state``."""
        reasons = (hook.why_end(state, error) for hook in self.hooks)
        self.reason = next((reason for reason in reasons if reason), "")
        return bool(self.reason)
