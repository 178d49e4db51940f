"""A method's side at the server: what is sent, to whom, and how replies are combined.

An author overrides what differs; the round itself is ``strategies.loop.round_loop``'s, which no
method copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from fedsilo.models.contract.messages import START, TRAIN
from fedsilo.models.contract.notes import Notes
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.site_facts import SiteFacts
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.averaging import weighted_mean
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.initial_arrays import initial_weights, starting_network
from fedsilo.strategies.loop.participants import Participants
from fedsilo.strategies.loop.reporting import MethodReport
from fedsilo.strategies.loop.robust import robust_mean
from fedsilo.strategies.loop.state import ArraySpec, RoundState, SiteReply
from fedsilo.strategies.wire.records import NDArray


class Method(MethodReport, ABC):
    """A method's server side.

    Attributes:
        title: the method's name for people.
        capabilities: what of the common settings it takes.
        common: the run's common settings.
        settings: the method's own.
        participants: the sites that take part; the loop puts another one here when a site joins.
    """

    title: ClassVar[str] = ""
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, common: CommonSettings, settings: Any, participants: Participants) -> None:
        self.common = common
        self.settings = settings
        self.participants = participants

    @classmethod
    def check_settings(cls, common: CommonSettings, settings: Any) -> None:
        """Refuse settings that contradict each other, by a ``SettingError``."""

    @classmethod
    def why_unfit(cls, common: CommonSettings, settings: Any, facts: SiteFacts) -> str:
        """Say why a site of these facts is of no use to the method, in one line; empty: it is.

        It is left out before anything is trained; 'min-sites' says whether the run goes on.
        """
        return ""

    @abstractmethod
    def initial_state(self, task: Task) -> RoundState:
        """Return the state before round 1."""

    def start(self, site: str, state: RoundState) -> Mapping[str, NDArray]:
        """Return what a site that keeps its own network starts from, as ``start/<name>``.

        Nothing where that is the seed's, which the site makes itself, or where it has begun.

        Raises:
            SettingError: the weights are missing or of another network.
        """
        begun = site in state.stateful_sites
        return {} if begun or not self.common.initial_weights else self._start

    @cached_property
    def _start(self) -> dict[str, NDArray]:
        arrays = initial_weights(starting_network(self.common, self.participants.task()))
        return {f"{START}{name}": array for name, array in arrays.items()}

    def phases(self, state: RoundState) -> Sequence[str]:
        """Return the phases of the round after ``state.round``."""
        return (TRAIN,)

    def recipients(self, phase: str, state: RoundState) -> list[str]:
        """Return the sites that ``phase`` asks; none skips it."""
        return self.participants.sites()

    def outgoing(self, phase: str, site: str, state: RoundState) -> Mapping[str, NDArray]:
        """Return the arrays that ``site`` is sent, the model; may be empty."""
        return self.model(state)

    def notes(self, phase: str, site: str, state: RoundState) -> Notes:
        """Return what else ``site`` is told."""
        return Notes()

    @abstractmethod
    def expected(self, phase: str, site: str, state: RoundState) -> Mapping[str, ArraySpec]:
        """Return the arrays that ``site`` must answer with."""

    def reference(self, phase: str, site: str, state: RoundState) -> Mapping[str, NDArray]:
        """Return what of ``state`` the arrays of ``site``'s reply are an update of, by their names.

        An update is measured from it, and of a round's updates the model's new state is made. A
        reply's array that is no update has no place in it.
        """
        return {
            name: state.arrays[name]
            for name, spec in self.expected(phase, site, state).items()
            if name in state.arrays and state.arrays[name].shape == spec.shape
        }

    def average(
        self, replies: Mapping[str, SiteReply], before: Mapping[str, NDArray], equal: bool = False
    ) -> dict[str, NDArray]:
        """Return the arrays named in ``before``, which sites began with, combined; float32.

        By 'aggregation': the n_k-weighted mean, with ``equal`` each site weighing the same, or one
        that a few sites cannot turn. Whatever averages weights of sites does it here.

        Raises:
            SiteError: too few sites have answered for 'aggregation'.
        """
        if self.common.aggregation == "mean":
            return weighted_mean(replies, before, equal)
        return robust_mean(self.common, replies, before, equal)

    def rejection_reason(self, phase: str, reply: SiteReply, state: RoundState) -> str | None:
        """Return why a reply of the right form cannot be used all the same, None if it can."""
        return None

    @abstractmethod
    def combine(
        self, phase: str, state: RoundState, replies: Mapping[str, SiteReply]
    ) -> RoundState:
        """Return the state after ``phase``; ``replies`` are checked and sorted by site."""

    def why_finished(self, state: RoundState) -> str:
        """Say why no further round is wanted before the last one; empty: go on."""
        return ""

    def model(self, state: RoundState) -> Mapping[str, NDArray]:
        """Return the arrays that are the finished run's model."""
        return state.arrays
