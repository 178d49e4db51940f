"""Hooks of the round loop: everything in a run besides the method's mathematics.

Metrics, traffic, checkpoints, progress and privacy accounting are hooks, and a run gets the hooks
that it needs. A hook's ``state`` returns the values that the hook must remember. The checkpoint
stores these values, and the hook's ``restore`` takes them back.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedsilo.core.errors import SiteError
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.loop.plausible import UpdateStatistics
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.reply import Reply


class Hook:
    """Base class: a hook overrides the events that it needs, and all other events do nothing.

    Attributes:
        name: the key of the hook's state in a checkpoint; empty if it has no state.
    """

    name = ""

    def run_started(self, state: State, participants: Participants, total_rounds: int) -> None:
        """Called before the first round of this process, with the state before that round."""

    def participants_changed(
        self, round_: int, participants: Participants, joined: list[str]
    ) -> None:
        """React to sites that have joined, or that have come back through another node.

        The loop calls this before any round, even the first. A node is a site's connection.

        Args:
            round_: the round that is about to begin.
            participants: all sites that take part, old and new.
            joined: the names of the sites that joined or came back, sorted.
        """

    def phase_started(self, round_: int, phase: str, sites: list[str]) -> None:
        """Called before messages are sent to ``sites``."""

    def reply_came(self, round_: int, phase: str, site: str) -> None:
        """Called when ``site`` has replied, whether or not the reply is usable."""

    def sites_away(self, round_: int, phase: str, sites: list[str]) -> None:
        """Called when the set of disconnected sites without a reply has changed to ``sites``."""

    def objection(self, round_: int, phase: str, reply: Reply) -> str | None:
        """Return the reason, in one line, to refuse a site's reply; None to accept it, the default.

        The server asks a hook last, and only if its own checks have found no fault in the reply.
        """
        return None

    def phase_ended(self, round_: int, phase: str, replies: Mapping[str, Reply]) -> None:
        """Called with the usable replies of a phase, sorted by site, if enough sites replied."""

    def updates_measured(
        self, round_: int, phase: str, parts: Mapping[str, UpdateStatistics]
    ) -> None:
        """React to the measured size and direction of the sites' updates.

        The loop calls this after a round, for each phase in which sites returned updates. ``parts``
        has each site's update norm, and the cosine between the update and the model's change.
        """

    def sums_measured(self, round_: int, phase: str, means: Mapping[str, float]) -> None:
        """Called after a secret sum, with the mean over the sites of each summed metric."""

    def answer_failed(self, round_: int, phase: str, site: str, code: str, cause: str) -> None:
        """React to a failure to get a usable answer, before the run continues or ends.

        The default does nothing.

        Args:
            round_: the round.
            phase: the phase of the question, such as "train". It is "hello" if a node asked to take
                part and was refused.
            site: the site's name. It is "unknown" for a refused node, and if secure aggregation
                hides the site that failed.
            code: the kind of failure, such as "no-answer". docs/run-directory.md lists all kinds.
            cause: the cause, in one line.
        """

    def site_failed(self, round_: int, phase: str, site: str, reason: str) -> None:
        """Called when the run continues without a usable reply of ``site`` in this phase."""

    def round_ended(self, state: State) -> None:
        """Called after each round that succeeds, with the new state."""

    def run_ended(self, state: State) -> None:
        """Called after the final evaluation."""

    def why_finished(self, state: State) -> str | None:
        """Return the reason to end the run early, in ``state``; called before each further round.

        The value None means that this hook does not end the run.
        """
        return None

    def why_end(self, state: State, error: SiteError) -> str | None:
        """Return a reason to end the run normally after a failed round; None if this hook has none.

        The loop stores the reason in ``RoundLoop.stopped``. If all hooks return None, the loop
        raises ``error``. The default is None.

        Args:
            state: the state before the failed round.
            error: the error that made the round fail.
        """
        return None

    def state(self) -> Any:
        """Return this hook's values that a resumed run needs, as JSON values.

        None means that the hook needs no values.
        """
        return None

    def restore(self, state: Any) -> None:
        """Take back the values that ``state`` returned, when a run is resumed."""


class Hooks:
    """The hooks of a run, to call at its events.

    An event is a method of ``Hook``. Only the hooks that override it are called.
    """

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._by_event: dict[str, list[Callable[..., Any]]] = {}
        for event, default in vars(Hook).items():
            if event.startswith("_") or not callable(default):
                continue
            for hook in hooks:
                if getattr(type(hook), event) is not default:
                    self._by_event.setdefault(event, []).append(getattr(hook, event))

    def call(self, event: str, *args: Any, **named: Any) -> None:
        """Call each hook that overrides ``event``, in the order in which the hooks were given."""
        for hook in self._by_event.get(event, ()):
            hook(*args, **named)

    def first(self, event: str, *args: Any) -> str | None:
        """Call the hooks for an event in their order, and return the first non-empty answer.

        Later hooks are not called. None and "" are empty answers. The result is None if all answers
        are empty. An exception in a hook is not caught.

        Args:
            event: the name of a ``Hook`` method, such as "why_end".
            args: the arguments of that method.
        """
        for hook in self._by_event.get(event, ()):
            answer: str | None = hook(*args)
            if answer:
                return answer
        return None
