"""Silos that go on from models of their own; the server relays between neighbours, no more.

Flower is a star: what one silo sends to another passes the server, which keeps of it nothing but
the newest model of each silo, for the next round and the checkpoint. Messages down:
``model/<array>`` (the consensus model Theta, where it is measured or starts a silo),
``neighbour/<site>/<array>`` of each in-neighbour of the round, and ``note.mixing``, the silo's row
of the mixing matrix as JSON. Up: the silo's own trained arrays by state-dict name. Theta is the
mean of theta_i over the silos that finished the round (vartheta_i of FedEFM, part 3), each with the
same weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from fedsilo.datasets.partition.silo_sets import open_silo_set
from fedsilo.models.contract.array_names import arrays_below, with_prefix
from fedsilo.models.contract.messages import EVALUATE, SECONDS
from fedsilo.models.contract.notes import Notes
from fedsilo.models.methods.decentralised import MODEL, NEIGHBOUR, LinkSettings, MixingNotes
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.capabilities import Capabilities
from fedsilo.strategies.loop.initial_arrays import initial_weights, starting_network
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.loop.reporting import Disclosures
from fedsilo.strategies.loop.state import ArraySpec, RoundState, SiteReply
from fedsilo.strategies.topology.cycle_time import topology_document
from fedsilo.strategies.topology.graphs import Topology, build_topology
from fedsilo.strategies.wire.records import NDArray

SILO = "silo/"
FINISHED = "finished"
_DOCUMENT = "topology.json"


class Decentralised(Method):
    """Asks each silo to mix with its neighbours and to train; a method names the topology."""

    settings: LinkSettings
    capabilities = Capabilities(initial_weights=True)

    def kind(self) -> str:
        """Return the topology's kind; among silos alone a star has one of them in the middle."""
        return among_silos(str(getattr(self.settings, "topology", self.common.method)))

    @cached_property
    def topology(self) -> Topology:
        """Who is whose neighbour."""
        silo_set = open_silo_set(self.common.silo_set) if self.common.silo_set else None
        budget = float(getattr(self.settings, "matcha_budget", 1.0))
        return build_topology(
            self.kind(), self.participants.sites(), silo_set, self.common.seed, budget
        )

    def disclosures(self) -> Disclosures:
        """Name the weights, and who gets them."""
        return Disclosures(
            "all weights and batch-norm statistics of the silo's own model, each round; they go to "
            f"its neighbours in the topology '{self.kind()}' {self.as_sent()}, and their mean over "
            "all silos to all silos"
        )

    def as_sent(self) -> str:
        """Say what is done to a model before it leaves its silo."""
        return "clipped and with noise" if self.common.clip_norm else "as they are"

    def initial_state(self, task: Task) -> RoundState:
        """Return the weights that every silo starts from, once the topology is found to be one.

        Raises:
            SettingError: the topology is not connected, or has other silos than take part.
        """
        self.topology  # noqa: B018  # built now, so that a run that cannot be does not begin
        weights = initial_weights(starting_network(self.common, task))
        return RoundState(0, {f"{MODEL}{name}": array for name, array in weights.items()})

    def model(self, state: RoundState) -> Mapping[str, NDArray]:
        """Return Theta."""
        return below(MODEL, state)

    def neighbours(self, site: str, state: RoundState) -> list[str]:
        """Return whose models ``site`` gets in the round after ``state``."""
        chosen = self.topology.in_neighbours(site, state.round + 1)
        return [other for other in chosen if self.has_model(other, state)]

    def has_model(self, site: str, state: RoundState) -> bool:
        """Tell whether the server has a model of ``site``."""
        return any(name.startswith(f"{SILO}{site}/") for name in state.arrays)

    def outgoing(self, phase: str, site: str, state: RoundState) -> Mapping[str, NDArray]:
        """Return Theta where it is needed, and to train the neighbours' models."""
        theta = below(MODEL, state, MODEL)
        if phase == EVALUATE:  # a finished run's state is Theta alone, by plain names
            return theta or {f"{MODEL}{name}": array for name, array in state.arrays.items()}
        arrays = theta if self._needs_theta(site, state) else {}
        return arrays | self.relayed(phase, site, state)

    def relayed(self, phase: str, site: str, state: RoundState) -> dict[str, NDArray]:
        """Return what others have sent for ``site``: their models."""
        arrays: dict[str, NDArray] = {}
        for other in self.neighbours(site, state):
            arrays |= below(f"{SILO}{other}/", state, f"{NEIGHBOUR}{other}/")
        return arrays

    def notes(self, phase: str, site: str, state: RoundState) -> Notes:
        """Tell the silo's row of the mixing matrix."""
        if phase == EVALUATE:
            return Notes()
        return MixingNotes(self.topology.mixing(site, state.round + 1))

    def expected(self, phase: str, site: str, state: RoundState) -> Mapping[str, ArraySpec]:
        """Expect the silo's own model."""
        return {name: ArraySpec(array.shape) for name, array in self.model(state).items()}

    def combine(
        self, phase: str, state: RoundState, replies: Mapping[str, SiteReply]
    ) -> RoundState:
        """Take the silos' models, and Theta as the mean of those that finished."""
        names = self.model(state)
        arrays = self.kept_models(names, state, replies)
        theta = self.average(replies, names, equal=True)
        arrays |= {f"{MODEL}{name}": array for name, array in theta.items()}
        self._take_times(replies)
        extras = {**state.extras, FINISHED: sorted(replies)}
        return RoundState(state.round, arrays, extras)

    def kept_models(
        self, names: Iterable[str], state: RoundState, replies: Mapping[str, SiteReply]
    ) -> dict[str, NDArray]:
        """Return the silos' newest models, which the next round takes to their neighbours."""
        arrays = {name: array for name, array in state.arrays.items() if name.startswith(SILO)}
        for site, reply in replies.items():
            arrays |= {f"{SILO}{site}/{name}": reply.array(name) for name in names}
        return arrays

    def documents(
        self, state: RoundState, values: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Any]:
        """Return the topology with its weights, and the cycle times of it and of others."""
        # Resumed after the last round, say, this process has not timed every silo
        timed = self._seconds.keys() == set(self.participants.sites())
        times = {site: total / count for site, (total, count) in self._seconds.items()}
        document = topology_document(
            self.topology,
            open_silo_set(self.common.silo_set) if self.common.silo_set else None,
            self.settings,
            model_bytes=sum(array.nbytes for array in self.model(state).values()),
            compute_seconds=times if timed else None,
            visit_seconds=self.visit_seconds() if timed else None,
        )
        return {_DOCUMENT: document}

    def visit_seconds(self) -> Mapping[str, float] | None:
        """Return how long each site trains one visiting model; None: there are no visits."""
        return None

    def _needs_theta(self, site: str, state: RoundState) -> bool:
        """Tell whether Theta is measured, starts a silo, or is what clipping measures from."""
        measured = self.common.measures_in(state.round + 1)
        return measured or site not in state.stateful_sites or self.common.clip_norm > 0

    @cached_property
    def _seconds(self) -> dict[str, tuple[float, int]]:
        """Seconds of training messages by silo, and how many, as far as this process has seen."""
        return {}

    def _take_times(self, replies: Mapping[str, SiteReply]) -> None:
        for site, reply in replies.items():
            total, count = self._seconds.get(site, (0.0, 0))
            self._seconds[site] = (total + reply.metric(SECONDS), count + 1)


def among_silos(kind: str) -> str:
    """Return the topology of ``kind`` where no server is in the middle: of a star a silo is."""
    return "hub" if kind == "star" else kind


def below(prefix: str, state: RoundState, new: str = "") -> dict[str, NDArray]:
    """Return the state's arrays whose names begin with ``prefix``, which ``new`` replaces."""
    return with_prefix(new, arrays_below(prefix, state.arrays))
