"""A method's side at the server: a state, and a round that reads as the paper's algorithm.

An author writes ``initial_state`` and ``round``, and overrides of the rest what differs. The loop
around them, checks, failures, checkpoints and differential privacy are the same for all methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from fedsilo.models.contract.messages import EVALUATE, START
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SiteFacts
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.ask import Ask
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.initial_arrays import initial_weights, starting_network
from fedsilo.strategies.loop.replies import Replies
from fedsilo.strategies.loop.state import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Arrays


class Disclosures:
    """What a method makes leave each site, in words, for ``privacy.json``.

    Attributes:
        leaves: a sentence for each kind of record.
        noise: what noise of the method's own is that is no differential privacy, if there is some.
    """

    def __init__(self, *leaves: str, noise: str = "") -> None:
        self.leaves = leaves
        self.noise = noise


class Method(ABC):
    """A method's server side.

    Attributes:
        title: the method's name for people.
        capabilities: which of the common settings it takes.
        state_class: the class of its states.
        common: the run's common settings.
        settings: the method's own.
        participants: the sites that take part; another one where a site joins late.
    """

    title: ClassVar[str] = ""
    capabilities: ClassVar[Capabilities] = Capabilities()
    state_class: ClassVar[type[State]] = State

    def __init__(self, common: CommonSettings, settings: Any, participants: Participants) -> None:
        self.common = common
        self.settings = settings
        self.participants = participants

    @abstractmethod
    def initial_state(self, task: Task) -> Any:
        """Return the state before round 1."""

    @abstractmethod
    def round(self, state: Any, ask: Ask) -> Any:
        """Run the round after ``state.round`` and return the state after it.

        The loop counts the round and notes who keeps private state.
        """

    def evaluate(self, state: Any, ask: Ask) -> None:
        """Have all sites measure the final model; nothing but metrics comes back."""
        ask(EVALUATE, dict.fromkeys(ask.sites, self.model(state)), expect={})

    def model(self, state: Any) -> Arrays:
        """Return the arrays that are the finished run's model."""
        arrays: Arrays = state.arrays
        return arrays

    def why_finished(self, state: Any) -> str | None:
        """Say why no further round is wanted before the last one, if none is."""
        return None

    def releases(self, site: str, state: Any) -> int:
        """Return how many replies with arrays the next round asks of ``site``, at most.

        Each is a release of differential privacy, so the number must be known before the round.
        """
        return 1

    @classmethod  # noqa: B027  # most methods take all settings
    def check_settings(cls, common: CommonSettings, settings: Any) -> None:
        """Refuse settings that contradict each other, by a ``SettingError``."""

    @classmethod
    def why_unfit(cls, common: CommonSettings, settings: Any, facts: SiteFacts) -> str | None:
        """Say in one line why a site of these facts is of no use to the method, if it is not.

        It is left out before anything is trained; 'min-sites' says whether the run goes on.
        """
        return None

    def average(self, replies: Replies, before: Arrays, equal: bool = False) -> dict[str, NDArray]:
        """Return the arrays named in ``before`` combined by 'aggregation', see ``Replies``."""
        return replies.average(self.common, before, equal)

    def start(self, site: str, ask: Ask) -> dict[str, NDArray]:
        """Return what a site that keeps its own network starts from, as ``start/<name>``.

        Nothing where that is the seed's, which the site makes itself, or where it has begun.

        Raises:
            SettingError: the weights are missing or of another network.
        """
        begun = site in ask.stateful_sites or not self.common.initial_weights
        return {} if begun else self._start

    @cached_property
    def _start(self) -> dict[str, NDArray]:
        arrays = initial_weights(starting_network(self.common, self.participants.task()))
        return {f"{START}{name}": array for name, array in arrays.items()}

    def disclosures(self) -> Disclosures:
        """Return what this method makes leave each site."""
        return Disclosures()

    def documents(self, state: Any, values: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """Return what else a run writes at its end: file name -> content for JSON.

        Args:
            state: the last round's.
            values: the final test metrics, site -> metric -> value.
        """
        return {}

    @classmethod
    def marks(cls, state: Any) -> dict[int, str]:
        """Return what happened in which round, for the round's line and the learning curves."""
        return {}
