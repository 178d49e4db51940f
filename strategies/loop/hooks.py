"""What happens beside the mathematics of a run, as hooks of the one round loop.

Metrics, traffic, checkpoints, progress and the account of differential privacy are hooks. A hook
with something to remember gives it to the checkpoint by ``state`` and takes it back by ``restore``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedsilo.models.contract.errors import SiteError
from fedsilo.strategies.loop.state import State
from fedsilo.strategies.loop.update_statistics import UpdateStatistics
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.reply import Reply


class Hook:
    """Does nothing; a hook overrides what it cares about."""

    name = ""

    def run_started(self, state: State, participants: Participants, total_rounds: int) -> None:
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

    def objection(self, round_: int, phase: str, reply: Reply) -> str | None:
        """Say in one line why a reply of the right form cannot be used, if it cannot."""
        return None

    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, Reply]) -> None:
        """Take note of a phase's good replies, sorted by site."""

    def updates_measured(
        self, round_: int, phase: str, parts: Mapping[str, UpdateStatistics]
    ) -> None:
        """Take note of what part each site had in a phase whose replies are updates."""

    def site_failed(self, round_: int, phase: str, site: str, reason: str) -> None:
        """Take note that the run goes on without ``site`` in this phase."""

    def round_ended(self, state: State) -> None:
        """Take note that a round is finished."""

    def run_ended(self, state: State) -> None:
        """Take note that the final evaluation is in."""

    def why_stop(self, state: State, ahead: Callable[[], Mapping[str, int]]) -> str | None:
        """Say why no round is to follow ``state``, if none is.

        ``ahead`` counts the replies with arrays that each site would give in that round, at most.
        """
        return None

    def why_end(self, state: State, error: SiteError) -> str | None:
        """Say why a round that failed by ``error`` ends the run well, at ``state``, if it does."""
        return None

    def state(self) -> Any:
        """Return what a resumed run needs, as JSON."""
        return None

    def restore(self, state: Any) -> None:
        """Take back what ``state`` gave."""


class Hooks:
    """The hooks of a run by event, each event with the hooks alone that override it."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._by_event: dict[str, list[Callable[..., Any]]] = {}
        for name in (name for name in vars(Hook) if not name.startswith("_")):
            own = [hook for hook in hooks if getattr(type(hook), name) is not getattr(Hook, name)]
            if own and callable(getattr(Hook, name)):
                self._by_event[name] = [getattr(hook, name) for hook in own]

    def has(self, event: str) -> bool:
        """Tell whether a hook wants an event."""
        return event in self._by_event

    def call(self, event: str, *args: Any, **named: Any) -> None:
        """Call the hooks that want an event."""
        for hook in self._by_event.get(event, ()):
            hook(*args, **named)

    def first(self, event: str, *args: Any) -> str | None:
        """Return the first sentence that a hook answers with, if one does."""
        answers = (hook(*args) for hook in self._by_event.get(event, ()))
        return next((answer for answer in answers if answer), None)
