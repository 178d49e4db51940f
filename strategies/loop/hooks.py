"""What a run does besides the mathematics, as hooks of the one round loop.

Metrics, traffic, checkpoints, progress and the account of differential privacy are hooks; a run is
given those that it needs. A hook with something to remember returns it by ``state``, which the
checkpoint stores, and takes it back by ``restore``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedsilo.models.contract.errors import SiteError
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.loop.plausible import UpdateStatistics
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.reply import Reply


class Hook:
    """A hook overrides the events that it needs; the others do nothing.

    Attributes:
        name: the key of the hook's state in a checkpoint, or an empty string if it has no state.
    """

    name = ""

    def run_started(self, state: State, participants: Participants, total_rounds: int) -> None:
        """Called before the round that follows ``state``, the first of this process."""

    def participants_changed(
        self, round_: int, participants: Participants, joined: list[str]
    ) -> None:
        """Called when sites joined before ``round_``, or returned on another node."""

    def phase_started(self, round_: int, phase: str, sites: list[str]) -> None:
        """Called before messages go to ``sites``."""

    def reply_came(self, round_: int, phase: str, site: str) -> None:
        """Called when ``site`` has answered, whether its reply is usable or not."""

    def sites_away(self, round_: int, phase: str, sites: list[str]) -> None:
        """Called when the unanswered sites that are disconnected have changed to ``sites``."""

    def objection(self, round_: int, phase: str, reply: Reply) -> str | None:
        """Return in one line why a reply of the right form cannot be used, or None if it can."""
        return None

    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, Reply]) -> None:
        """Called with a phase's usable replies, sorted by site."""

    def updates_measured(
        self, round_: int, phase: str, parts: Mapping[str, UpdateStatistics]
    ) -> None:
        """Called with each site's contribution to a phase whose replies are updates."""

    def sums_measured(self, round_: int, phase: str, means: Mapping[str, float]) -> None:
        """Called with the means over all sites of what was measured and summed in secret."""

    def site_failed(self, round_: int, phase: str, site: str, reason: str) -> None:
        """Called when the run continues without ``site`` in this phase."""

    def round_ended(self, state: State) -> None:
        """Called after each round."""

    def run_ended(self, state: State) -> None:
        """Called after the final evaluation."""

    def why_finished(self, state: State) -> str | None:
        """Return why no round is wanted after ``state``, or None."""
        return None

    def why_end(self, state: State, error: SiteError) -> str | None:
        """Return why a round that failed by ``error`` ends the run well at ``state``, or None."""
        return None

    def state(self) -> Any:
        """Return what a resumed run needs, as JSON."""
        return None

    def restore(self, state: Any) -> None:
        """Take back what ``state`` returned."""


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
