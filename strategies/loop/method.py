"""A method's side at the server: a state, and a round that reads as the paper's algorithm.

An author writes ``round``, and overrides of the rest what differs. The loop around it, checks,
failures, checkpoints and differential privacy are the same for all methods. ``__all__`` are the
names that a method's file takes from ``strategies``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import nn

from fedsilo.datasets.weights.backbones import load_backbone
from fedsilo.datasets.weights.initial_weights import load_initial_weights
from fedsilo.models.contract.array_names import with_prefix
from fedsilo.models.contract.errors import CheckpointError
from fedsilo.models.contract.messages import EVALUATE, ROUND_KEYS, START, state_key
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.exchanged import exchanged_arrays
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.site_network import TokenClassifier
from fedsilo.strategies.loop.ask import Ask, Replies
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.compressed import compression_of
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Arrays, ArraySpec, Reply, Specs

__all__ = ["ArraySpec", "Arrays", "Ask", "Capabilities", "Disclosures", "Method", "Reply", "State"]


@dataclass(frozen=True)
class State:
    """A method's state after a round; a method that remembers more adds fields of JSON values."""

    # The global arrays by name; empty where nothing is shared
    arrays: Arrays = field(default_factory=dict)
    round: int = 0  # rounds finished; 0 before the first
    # By site that keeps private state of this run, the newest that it has reported (``state_key``),
    # as the loop has seen
    kept: Mapping[str, int] = field(default_factory=dict)

    @property
    def stateful_sites(self) -> tuple[str, ...]:
        """The sites that keep private state of this run, sorted."""
        return tuple(sorted(self.kept))

    def facts(self) -> dict[str, Any]:
        """Return all but the arrays, as JSON values.

        Raises:
            CheckpointError: a field is of others.
        """
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _SHARED}
        if odd := [name for name, value in own.items() if not _returns(value)]:
            raise CheckpointError(
                f"'{odd[0]}' of {type(self).__name__} has values that JSON does not give back, so "
                "that a resumed run would differ: take lists, numbers, texts, and texts as keys"
            )
        return {"round": self.round, "extras": own, "keepers": dict(self.kept)}

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
                f"the stored state has {sorted(extras)} in addition to its arrays, not "
                f"{sorted(own)}: it was made by another version of fedsilo; start a new run"
            )
        # A run that began before a round had so many keys had a hundred
        old = {s: state_key(*divmod(k, 100)) for s, k in facts["keepers"].items() if k < ROUND_KEYS}
        return cls(arrays, facts["round"], {**facts["keepers"], **old}, **extras)


_SHARED = {"arrays", "round", "kept"}


def _returns(value: Any) -> bool:
    """Tell whether JSON gives a value back, but for tuples, which become lists."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _returns(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(_returns, value))
    return value is None or isinstance(value, int | float | str)


class Disclosures:
    """What a method makes leave each site, in words, for ``privacy.json``."""

    def __init__(self, *leaves: str, noise: str = "") -> None:
        self.leaves = leaves  # a sentence for each kind of record
        # What noise of the method's own is that is not differential privacy, if there is some
        self.noise = noise

    def also(self, *leaves: str) -> Disclosures:
        """Return the same with more that leaves."""
        return Disclosures(*self.leaves, *leaves, noise=self.noise)


class Method(ABC):
    """A method's server side.

    Attributes:
        capabilities: which of the common settings it takes.
        state_class: the class of its states.
        beside: the kinds of arrays of its states that are not part of the model.
        common: the run's common settings.
        settings: the method's own.
        participants: the sites that take part; another one where a site joins late.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    beside: ClassVar[tuple[str, ...]] = ()
    state_class: ClassVar[type[State]] = State

    def __init__(self, common: CommonSettings, settings: Any, participants: Participants) -> None:
        self.common = common
        self.settings = settings
        self.participants = participants

    @property
    def task(self) -> Task:
        """What the sites' data ask of a network."""
        return self.participants.task()

    @cached_property
    def blueprint(self) -> TokenClassifier:
        """The run's network without numbers: its sizes and the names and shapes of its arrays."""
        with torch.device("meta"):
            return build_classifier(self.common, self.task)

    def weight_specs(self) -> Specs:
        """Return what the arrays of the run's network must be."""
        arrays = exchanged_arrays(self.blueprint)
        return {name: ArraySpec(tuple(array.shape)) for name, array in arrays.items()}

    def starting_weights(self) -> dict[str, NDArray]:
        """Return the arrays of the network that a run starts from, keyed on the seed.

        Raises:
            SettingError: its weights are missing or of another network.
        """
        return initial_weights(starting_network(self.common, self.task))

    def initial_state(self) -> Any:
        """Return the state before round 1: empty, where the server has no arrays then."""
        return self.state_class()

    def notices(self) -> Iterable[str]:
        """Return what a run should say of these settings and sites before it begins."""
        return ()

    @abstractmethod
    def round(self, state: Any, ask: Ask) -> Any:
        """Run the round after ``state.round`` and return the state after it.

        The loop counts the round and notes who keeps private state.
        """

    def evaluate(self, state: Any, ask: Ask) -> None:
        """Have all sites measure the final model; nothing but metrics comes back."""
        ask(EVALUATE, {site: self.model_for(site, state) for site in ask.sites}, expect={})

    def model_for(self, site: str, state: Any) -> Arrays:
        """Return what ``site`` needs to measure the final model: here all of it."""
        return self.model(state)

    def model(self, state: Any) -> Arrays:
        """Return the arrays that are the finished run's model."""
        arrays: Arrays = state.arrays
        return {n: array for n, array in arrays.items() if not n.startswith(self.beside)}

    def why_finished(self, state: Any) -> str | None:
        """Say why no further round is wanted before the last one, if none is."""
        return None

    def average(self, replies: Replies, before: Arrays, equal: bool = False) -> dict[str, NDArray]:
        """Return the arrays named in ``before`` combined by 'aggregation', see ``Replies``."""
        return replies.average(self.common, before, equal)

    def share(self, replies: Replies) -> float:
        """Return the share of all sites' weight in averages that the sites of ``replies`` have.

        Where sites do not say how many samples they have, it is the share of all sites; those of a
        secret sum that could not answer have none.
        """
        every = {site: f.sizes().get("train", 1) for site, f in self.participants.facts.items()}
        every |= self.participants.agreed()
        weights = float(sum(every[site] for site in replies))
        if replies.failed:  # nobody knows which they are
            weights *= 1 - replies.failed / len(replies)
        return weights / sum(every.values())

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
        return with_prefix(START, self.starting_weights())

    @abstractmethod
    def disclosures(self) -> Disclosures:
        """Return what this method makes leave each site; nothing is ``Disclosures()``."""

    def leaves(self) -> list[str]:
        """Return all that sites and method make leave, in words."""
        compression = compression_of(self.common)
        fewer = compression.disclosure() if compression else ""
        words = [*self.participants.leaves(), *self.disclosures().leaves, fewer]
        return [sentence for sentence in words if sentence]

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


def initial_weights(network: nn.Module) -> dict[str, NDArray]:
    """Return the exchanged arrays of a new network; for one seed the same for every method."""
    return {name: tensor.numpy() for name, tensor in exchanged_arrays(network).items()}


def starting_network(common: CommonSettings, task: Task) -> TokenClassifier:
    """Return the network that a run starts from; given weights only if they are exchanged.

    Raises:
        SettingError: its weights are missing or of another architecture.
    """
    network = build_classifier(common, task)
    if common.train_backbone or common.network == "resnet22":
        load_backbone(network, common)
    load_initial_weights(network, common)
    return network
