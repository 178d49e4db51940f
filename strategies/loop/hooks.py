"""What happens beside the mathematics of a run, as hooks of the one round loop.

Metrics, traffic, checkpoints, progress and the account of differential privacy are hooks. A hook
with something to remember gives it to the checkpoint by ``state`` and takes it back by ``restore``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from models.contract.errors import SiteError
from strategies.loop.roster import Roster
from strategies.loop.state import RoundState, SiteReply

if TYPE_CHECKING:
    from strategies.loop.federated_strategy import FederatedStrategy


class Hook:
    """Does nothing; a hook overrides what it cares about."""

    name = ""

    def run_started(self, state: RoundState, roster: Roster, total_rounds: int) -> None:
        """Take note that the loop goes on after ``state.round``."""

    def roster_changed(self, round_: int, roster: Roster, joined: list[str]) -> None:
        """Take note that sites joined before ``round_``, or came back on another node."""

    def phase_started(self, round_: int, phase: str, sites: list[str]) -> None:
        """Take note that messages go to ``sites``."""

    def reply_came(self, round_: int, phase: str, site: str) -> None:
        """Take note that ``site`` has answered, well or badly."""

    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, SiteReply]) -> None:
        """Take note of a phase's good replies, sorted by site."""

    def site_failed(self, round_: int, phase: str, site: str, reason: str) -> None:
        """Take note that the run goes on without ``site`` in this phase."""

    def round_ended(self, state: RoundState) -> None:
        """Take note that a round is finished."""

    def run_ended(self, state: RoundState) -> None:
        """Take note that the final evaluation is in."""

    def why_stop(self, state: RoundState, ahead: Callable[[], Mapping[str, int]]) -> str:
        """Say why no round is to follow ``state``; empty: go on.

        ``ahead`` counts the replies with arrays that each site would give in that round, at most.
        """
        return ""

    def why_end(self, state: RoundState, error: SiteError) -> str:
        """Say why a round that failed by ``error`` ends the run well, at ``state``; empty: no."""
        return ""

    def state(self) -> Any:
        """Return what a resumed run needs, as JSON."""
        return None

    def restore(self, state: Any) -> None:
        """Take back what ``state`` gave."""


class Stop:
    """Why a run ends before its last round, where a hook says so.

    Attributes:
        reason: the hook's sentence; empty while the run goes on.
    """

    def __init__(self, strategy: FederatedStrategy) -> None:
        self.strategy = strategy
        self.reason = ""

    def due(self) -> bool:
        """Ask the hooks whether another round may begin."""
        state = self.strategy.current()
        for hook in self.strategy.hooks:
            self.reason = self.reason or hook.why_stop(state, self._ahead)
        return bool(self.reason)

    @contextmanager
    def rather_than_fail(self) -> Iterator[None]:
        """Take a round back that failed, if a hook says that it ends the run well.

        Raises:
            SiteError: no hook does.
        """
        before = self.strategy.current()
        try:
            yield
        except SiteError as error:
            reasons = (hook.why_end(before, error) for hook in self.strategy.hooks)
            self.reason = next((reason for reason in reasons if reason), "")
            if not self.reason:
                raise
            self.strategy.state = before

    def _ahead(self) -> dict[str, int]:
        strategy, state = self.strategy, self.strategy.current()
        phases = strategy.phases(state)
        return {
            site: sum(1 for phase in phases if strategy.expected(phase, site, state))
            for site in strategy.roster.sites()
        }
