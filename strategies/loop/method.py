"""The server's side of a method: a state, and a round that reads like the paper's algorithm.

An author writes ``round`` and overrides the other functions only where the method differs. The
loop, checks, failures, checkpoints and differential privacy are the same for all methods. A
method's file imports from ``strategies`` the names in ``__all__``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import nn

from fedsilo.core.array_names import with_prefix
from fedsilo.core.errors import CheckpointError
from fedsilo.core.messages import EVALUATE, ROUND_KEYS, START, state_key
from fedsilo.core.settings.common_settings import AUTO, CommonSettings
from fedsilo.datasets.weights.backbones import load_backbone
from fedsilo.datasets.weights.initial_weights import load_initial_weights
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays
from fedsilo.models.tasks.task import Task, task_of
from fedsilo.strategies.loop.ask import Ask, Replies, weighted_mean
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.robust import robust_mean
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.wire.compressed import compression_of
from fedsilo.strategies.wire.records import NDArray
from fedsilo.strategies.wire.reply import Arrays, ArraySpec, Reply, Specs

__all__ = ["ArraySpec", "Arrays", "Ask", "Capabilities", "Disclosures", "Method", "Reply", "State"]


@dataclass(frozen=True)
class State:
    """The state of a method after a round; a method may add fields with JSON values."""

    # The global arrays by name; empty if the method shares none
    arrays: Arrays = field(default_factory=dict)
    round: int = 0  # finished rounds; 0 before the first
    # The newest state that each site reports to keep (``state_key``), by site; the loop sets it
    kept: Mapping[str, int] = field(default_factory=dict)
    # The proof of the newest secret sum, which the sites check (``SumProof.to_values``); empty
    # unless the method proves its sums. The loop sets it
    proof: Mapping[str, list[str]] = field(default_factory=dict, kw_only=True)

    @property
    def stateful_sites(self) -> tuple[str, ...]:
        """The names of the sites that keep private state of this run, sorted."""
        return tuple(sorted(self.kept))

    def facts(self) -> dict[str, Any]:
        """Return everything in the state except the arrays as JSON values, for a checkpoint.

        The keys are:

        - "round": the number of finished rounds.
        - "keepers": ``kept``, which has a number for the newest private state of each site.
        - "extras": the fields that the method adds, by name.
        - "proof": the values that prove the newest secret sum to the sites. The key is absent if
          there are none.

        Raises:
            CheckpointError: JSON would change the value of a field that the method adds.
        """
        own: dict[str, Any] = {}
        for field_ in fields(self):
            name = field_.name
            if name in _SHARED:
                continue
            own[name] = getattr(self, name)
            if not _survives_json(own[name]):
                raise CheckpointError(
                    f"'{name}' of {type(self).__name__} has values that JSON would change, so a "
                    "resumed run would differ: use lists, numbers and texts, and texts as keys"
                )
        stored = {"round": self.round, "extras": own, "keepers": dict(self.kept)}
        if self.proof:  # checkpoints of other methods stay as they were
            stored["proof"] = dict(self.proof)
        return stored

    @classmethod
    def restored(cls, arrays: Arrays, facts: Mapping[str, Any]) -> Self:
        """Build the state from its stored ``arrays`` and the values that ``facts()`` returned.

        Older versions numbered the sites' private states by 100 per round. Such numbers are below
        ``ROUND_KEYS``, and are converted by ``state_key``.

        Raises:
            CheckpointError: the names of the stored fields differ from the fields of this class,
                because another method or version stored them.
        """
        extras = dict(facts.get("extras", {}))
        own = {field_.name for field_ in fields(cls)} - _SHARED
        if extras.keys() != own:
            raise CheckpointError(
                f"the stored state has {sorted(extras)} in addition to its arrays, not "
                f"{sorted(own)}: it was made by another version of fedsilo; start a new run"
            )
        kept: dict[str, int] = {}
        for site, key in facts["keepers"].items():
            kept[site] = key
            if key < ROUND_KEYS:  # older runs numbered states with 100 keys per round
                kept[site] = state_key(*divmod(key, 100))
        return cls(arrays, facts["round"], kept, proof=facts.get("proof", {}), **extras)


_SHARED = {"arrays", "round", "kept", "proof"}


def _survives_json(value: Any) -> bool:
    """Return whether a value stays the same when it is written to JSON and read back.

    The result is True for None, bool, int, float and str, even for NaN and infinity. It is also
    True for lists, tuples and dicts of such values, if all keys are strings. A tuple counts as the
    same, although JSON makes it a list.
    """
    if isinstance(value, dict):
        has_text_keys = all(isinstance(key, str) for key in value)
        return has_text_keys and all(map(_survives_json, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_survives_json, value))
    return value is None or isinstance(value, int | float | str)


class Disclosures:
    """The data that a method's sites send, as sentences for ``privacy.json``."""

    def __init__(self, *leaves: str, noise: str = "") -> None:
        self.leaves = leaves  # one sentence for each kind of data
        # The method's own noise that is not differential privacy, in words; empty without it
        self.noise = noise

    def also(self, *leaves: str) -> Disclosures:
        """Return a copy with more sentences at the end, and with the same noise text."""
        return Disclosures(*self.leaves, *leaves, noise=self.noise)


class Method(ABC):
    """The server's side of a method.

    Attributes:
        capabilities: the common settings that the method supports.
        state_class: the class of its states.
        beside: the prefixes of the arrays in its states that are not part of the model.
        common: the run's common settings.
        settings: the method's own settings.
        participants: the sites that take part; replaced when a site joins late.
        task: the run's task: its loss, labels and metrics.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    beside: ClassVar[tuple[str, ...]] = ()
    state_class: ClassVar[type[State]] = State

    def __init__(self, common: CommonSettings, settings: Any, participants: Participants) -> None:
        self.common = common
        self.settings = settings
        self.participants = participants
        self.task: Task = task_of(common)

    @property
    def shape(self) -> NetworkShape:
        """The input shape and classes that all sites' data share."""
        return self.participants.shape()

    @cached_property
    def blueprint(self) -> TokenClassifier:
        """The run's network without values: sizes, and the names and shapes of its arrays."""
        with torch.device("meta"):
            return build_classifier(self.common, self.shape)

    def weight_specs(self) -> Specs:
        """Return the shape and type of each exchanged array of the run's network."""
        arrays = exchanged_arrays(self.blueprint)
        return {name: ArraySpec(tuple(array.shape)) for name, array in arrays.items()}

    def starting_weights(self) -> dict[str, NDArray]:
        """Return the weights that sites exchange, as they are at the start of a run.

        Frozen parts are left out (``exchanged_arrays``). ``starting_network`` draws the weights
        from the seed, and replaces them by those in the files that the settings name.

        Raises:
            SettingError: a file of weights is missing or belongs to another network.
        """
        return initial_weights(starting_network(self.common, self.shape))

    def initial_state(self) -> Any:
        """Return the state before round 1. The default is a state without arrays."""
        return self.state_class()

    def notices(self) -> Iterable[str]:
        """Return remarks on the settings and sites, to print before the run. Default: none."""
        return ()

    @abstractmethod
    def round(self, state: Any, ask: Ask) -> Any:
        """Run the round after ``state.round`` and return the new state.

        The loop itself counts the round and notes which sites keep private state.
        """

    def evaluate(self, state: Any, ask: Ask) -> None:
        """Let all sites measure the final model. Sites return only metrics."""
        send = {site: self.model_for(site, state) for site in ask.sites}
        ask(EVALUATE, send, expect={})

    def model_for(self, site: str, state: Any) -> Arrays:
        """Return the arrays that ``site`` needs to measure the final model.

        The default is the whole model.
        """
        return self.model(state)

    def model(self, state: Any) -> Arrays:
        """Return the arrays that a finished run stores as its model, by name.

        These are the arrays of ``state``, a ``State``, without those that only training needs, such
        as moments of an optimiser. An array is left out if its name starts with a prefix in
        ``beside``.
        """
        arrays: Arrays = state.arrays
        model: dict[str, NDArray] = {}
        for name, array in arrays.items():
            if not name.startswith(self.beside):
                model[name] = array
        return model

    def why_finished(self, state: Any) -> str | None:
        """Return the reason to end the run before its last round; None if the run continues.

        The default is None.
        """
        return None

    def average(self, replies: Replies, before: Arrays, equal: bool = False) -> dict[str, NDArray]:
        """Combine the replies' arrays by 'server.aggregation'.

        "mean" and "auto" give each site the weight of its training samples. The robust
        aggregations, such as "median", limit the influence of faulty sites (``robust_mean``). After
        a secure sum only the mean weighted by samples is known, so it is always returned.

        Args:
            replies: the replies to combine.
            before: the arrays that the sites started from. Only arrays with these names are
                combined.
            equal: give each site the same weight. Most robust aggregations always do.

        Returns:
            The combined arrays by name, float32. If ``replies`` is empty, a copy of ``before``.

        Raises:
            SiteError: too few sites replied for 'server.aggregation'.
        """
        if replies.sums is not None:
            return {name: replies.sums[name] for name in sorted(before)}
        if not replies:
            return dict(before)  # no site has changed them
        if self.common.aggregation in (AUTO, "mean"):
            return weighted_mean(replies, before, equal)
        return robust_mean(self.common, replies, before, equal)

    def share(self, replies: Replies) -> float:
        """Return the replying sites' share of the training samples of all sites, from 0 to 1.

        A site counts with the number of training samples that it reported. A number in the file
        'run.site-weights' replaces this number. A site with neither counts as one sample. In a
        secure sum, f of the n sites in ``replies`` could not answer, and the server learns only the
        number f (``replies.failed``). The share is then multiplied by 1 - f / n.
        """
        every: dict[str, int] = {}
        for site, facts in self.participants.facts.items():
            every[site] = facts.sizes.get("train", 1)
        every |= self.participants.agreed_samples()
        weights = float(sum(every[site] for site in replies))
        if replies.failed:  # nobody knows which sites failed, so the mean weight is taken off
            weights *= 1 - replies.failed / len(replies)
        return weights / sum(every.values())

    def start(self, site: str, ask: Ask) -> dict[str, NDArray]:
        """Return the starting weights to send to ``site``, for a network that stays at the site.

        The keys are ``start/<name>``. The mapping is empty in two cases. Either the site already
        keeps state (``ask.stateful_sites``), or 'train.initial-weights' is empty and the site draws
        the same weights from the seed.

        Raises:
            SettingError: the file of initial weights is missing or belongs to another network.
        """
        if site in ask.stateful_sites or not self.common.initial_weights:
            return {}
        return self._start

    @cached_property
    def _start(self) -> dict[str, NDArray]:
        return with_prefix(START, self.starting_weights())

    @abstractmethod
    def disclosures(self) -> Disclosures:
        """Describe the data that this method's sites send.

        Returns ``Disclosures()`` if they send no data.
        """

    def leaves(self) -> list[str]:
        """Return sentences for ``privacy.json`` about all data that leave a site.

        They come in this order:

        - a sentence about sums over a table's features, if sites send such sums before round 1,
        - the sentences of ``disclosures`` about the data that the method's sites send,
        - a sentence about the rounding of updates, unless 'server.wire-precision' and
          'server.wire-down' are both 'fp32'.
        """
        sentences = [*self.participants.leaves(), *self.disclosures().leaves]
        compression = compression_of(self.common)
        if compression:
            sentences.append(compression.disclosure())
        return [sentence for sentence in sentences if sentence]

    def documents(self, state: Any, values: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """Return the content of the method's own JSON files, by file name, for the end of a run.

        The caller writes the files. The default is an empty mapping.

        Args:
            state: the state after the last round.
            values: the final test metrics, as a mapping from metric to value for each site.
        """
        return {}

    @classmethod
    def marks(cls, state: Any) -> dict[int, str]:
        """Return the method's events, round -> text, for the log and the curves. Default: none."""
        return {}


def initial_weights(network: nn.Module) -> dict[str, NDArray]:
    """Return the exchanged arrays of a network, by name. They share memory with the network."""
    return {name: tensor.numpy() for name, tensor in exchanged_arrays(network).items()}


def starting_network(common: CommonSettings, shape: NetworkShape) -> TokenClassifier:
    """Build the network that a run starts from, with weights from the seed or from files.

    Weights are set in this order, and later ones replace earlier ones:

    1. random weights from the seed,
    2. the backbone weights that 'vit.backbone-weights' names, if sites exchange the backbone or the
       network is "resnet22",
    3. the weights in the file 'train.initial-weights', if that setting is not empty.

    ``shape`` gives the shape of an input and the number of outputs.

    Raises:
        SettingError: a file of weights is missing or belongs to another architecture.
    """
    network = build_classifier(common, shape)
    if common.train_backbone or common.network == "resnet22":
        load_backbone(network, common)
    load_initial_weights(network, common)
    return network
