"""A method's side at the server: a state, and a round that reads as the paper's algorithm.

An author writes ``initial_state`` and ``round``, and overrides of the rest what differs. The loop
around them, checks, failures, checkpoints and differential privacy are the same for all methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Self

from fedsilo.models.contract.errors import CheckpointError
from fedsilo.models.contract.messages import EVALUATE, START
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SiteFacts
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.ask import Ask, Replies
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.initial_arrays import initial_weights, starting_network
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.records import NDArray
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


class Disclosures:
    """What a method makes leave each site, in words, for ``privacy.json``.

    Attributes:
        leaves: a sentence for each kind of record.
        noise: what noise of the method's own is that is no differential privacy, if there is some.
    """

    def __init__(self, *leaves: str, noise: str = "") -> None:
        self.leaves = leaves
        self.noise = noise

    def also(self, *leaves: str) -> Disclosures:
        """Return the same with more that leaves."""
        return Disclosures(*self.leaves, *leaves, noise=self.noise)


class Method(ABC):
    """A method's server side.

    Attributes:
        title: the method's name for people.
        capabilities: which of the common settings it takes.
        state_class: the class of its states.
        beside: the kinds of arrays of its states that are no part of the model.
        common: the run's common settings.
        settings: the method's own.
        participants: the sites that take part; another one where a site joins late.
    """

    title: ClassVar[str] = ""
    capabilities: ClassVar[Capabilities] = Capabilities()
    beside: ClassVar[tuple[str, ...]] = ()
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
        return {n: array for n, array in arrays.items() if not n.startswith(self.beside)}

    def why_finished(self, state: Any) -> str | None:
        """Say why no further round is wanted before the last one, if none is."""
        return None

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

    def share(self, replies: Replies) -> float:
        """Return the share of all sites' training samples that the sites of ``replies`` have."""
        every = {site: f.sizes()["train"] for site, f in self.participants.facts.items()}
        return sum(every[site] for site in replies) / sum(every.values())

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
