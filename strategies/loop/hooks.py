"""What happens beside the mathematics of a run, as hooks of the one round loop.

Metrics, traffic, checkpoints, progress and the account of differential privacy are hooks. A hook
with something to remember gives it to the checkpoint by ``state`` and takes it back by ``restore``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedsilo.models.contract.errors import SiteError
from fedsilo.strategies.loop.contributions import Contribution
from fedsilo.strategies.loop.participants import Participants
from fedsilo.strategies.loop.state import RoundState, SiteReply


class Hook:
    """Does nothing; a hook overrides what it cares about."""

    name = ""

    def run_started(self, state: RoundState, participants: Participants, total_rounds: int) -> None:
        """Take note that the loop goes on after ``state.round``."""

    def participants_changed(
        self, round_: int, participants: Participants, joined: list[str]
    ) -> None:
        """Take note that sites joined before ``round_``, or came back on another node."""

    def phase_started(self, round_: int, phase: str, sites: list[str]) -> None:
        """Take note that messages go to ``sites``."""

    def arrays_asked(self, round_: int, phase: str, sites: list[str]) -> None:
        """Take note, before messages go out, that those to ``sites`` ask for arrays."""

    def reply_came(self, round_: int, phase: str, site: str) -> None:
        """Take note that ``site`` has answered, well or badly."""

    def sites_away(self, round_: int, phase: str, sites: list[str]) -> None:
        """Take note that of the sites that have not answered just ``sites`` are disconnected."""

    def objection(self, round_: int, phase: str, reply: SiteReply) -> str:
        """Say in one line why a reply of the right form cannot be used; empty: it can."""
        return ""

    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, SiteReply]) -> None:
        """Take note of a phase's good replies, sorted by site."""

    def updates_measured(
        self, round_: int, phase: str, contributions: Mapping[str, Contribution]
    ) -> None:
        """Take note of what part each site had in a phase whose replies are updates."""

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
