"""Silos that continue from models of their own; the server relays between neighbours, no more.

Flower is a star: what one silo sends to another passes the server, which keeps of it nothing but
the newest model of each silo, for the next round and the checkpoint. Messages down:
``model/<array>`` (the consensus model Theta, where it is measured or starts a silo),
``neighbour/<site>/<array>`` of each in-neighbour of the round, and ``note.mixing``, the silo's row
of the mixing matrix as JSON. Up: the silo's own trained arrays by state-dict name. Theta is the
mean of theta_i over the silos that finished the round (vartheta_i of FedEFM, part 3), each with the
same weight.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from fedsilo.datasets.partition.silo_sets import open_silo_set
from fedsilo.models.contract.array_names import arrays_below, with_prefix
from fedsilo.models.contract.messages import SECONDS, TRAIN
from fedsilo.models.methods.decentralised import MODEL, NEIGHBOUR, LinkSettings, MixingNotes
from fedsilo.strategies.loop.ask import Replies
from fedsilo.strategies.loop.method import (
    Arrays,
    Ask,
    Capabilities,
    Disclosures,
    Method,
    Reply,
    State,
)
from fedsilo.strategies.topology.cycle_time import topology_document
from fedsilo.strategies.topology.graphs import Topology, build_topology
from fedsilo.strategies.wire.records import NDArray

SILO = "silo/"
_DOCUMENT = "topology.json"


class Decentralised(Method):
    """Asks each silo to mix with its neighbours and to train; a method names the topology.

    A state has Theta as ``model/<array>`` and the newest model of each silo as
    ``silo/<site>/<array>``.
    """

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

    def initial_state(self) -> Any:
        """Return the weights that every silo starts from, once the topology is found to be one.

        Raises:
            SettingError: the topology is not connected, or has other silos than take part.
        """
        self.topology  # noqa: B018  # built now, so that a run that cannot be does not begin
        return self.state_class(with_prefix(MODEL, self.starting_weights()))

    def round(self, state: Any, ask: Ask) -> Any:
        """Have each silo mix its neighbours' models with its own and train the mixture."""
        trained = ask(
            TRAIN,
            {
                s: self.theta_for(s, state, ask) | self.neighbours_models(s, state)
                for s in ask.sites
            },
            expect=dict.fromkeys(ask.sites, self.model(state)),
            notes={s: MixingNotes(self.topology.mixing(s, state.round + 1)) for s in ask.sites},
        )
        return self.with_models(state, trained)

    def model_for(self, site: str, state: State) -> Arrays:
        """Return Theta; the state of a finished run is Theta alone, by plain names."""
        return with_prefix(MODEL, self.model(state) or state.arrays)

    def model(self, state: State) -> dict[str, NDArray]:
        """Return Theta."""
        return arrays_below(MODEL, state.arrays)

    def theta_for(self, site: str, state: State, ask: Ask) -> dict[str, NDArray]:
        """Return Theta where it is measured or starts a silo."""
        measured = self.common.measures_in(state.round + 1)
        needed = measured or site not in ask.stateful_sites
        return with_prefix(MODEL, self.model(state)) if needed else {}

    def neighbours_models(self, site: str, state: State) -> dict[str, NDArray]:
        """Return the models of the in-neighbours of ``site``, as they are sent to it."""
        arrays: dict[str, NDArray] = {}
        for other in self.topology.in_neighbours(site, state.round + 1):
            arrays |= with_prefix(f"{NEIGHBOUR}{other}/", silo_model(other, state))
        return arrays

    def with_models(self, state: Any, trained: Replies) -> Any:
        """Return the state with the silos' models, and Theta as the mean of those that finished."""
        theta = self.average(trained, self.model(state), equal=True)
        arrays = {n: array for n, array in state.arrays.items() if n.startswith(SILO)}
        for site, reply in trained.items():
            arrays |= with_prefix(f"{SILO}{site}/", {name: reply.arrays[name] for name in theta})
        self.time(trained)
        return replace(state, arrays=arrays | with_prefix(MODEL, theta))

    def time(self, replies: Mapping[str, Reply]) -> None:
        """Take note of how long each silo trained."""
        for site, reply in replies.items():
            total, count = self._seconds.get(site, (0.0, 0))
            self._seconds[site] = (total + reply.metrics.get(SECONDS, 0.0), count + 1)

    @cached_property
    def _seconds(self) -> dict[str, tuple[float, int]]:
        """Seconds of training messages by silo, and how many, as far as this process has seen."""
        return {}

    def visit_seconds(self) -> Mapping[str, float] | None:
        """Return how long each site trains one visiting model; None where there are no visits."""
        return None

    def documents(self, state: Any, values: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
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

    def disclosures(self) -> Disclosures:
        """Name the weights, and who gets them."""
        return Disclosures(
            "all weights and batch-norm statistics of the silo's own model, each round; they go to "
            f"its neighbours in the topology '{self.kind()}', and their mean over all silos to all "
            "silos"
        )


def among_silos(kind: str) -> str:
    """Return the topology of ``kind`` where no server is in the middle: of a star a silo is."""
    return "hub" if kind == "star" else kind


def silo_model(site: str, state: State) -> Arrays:
    """Return the newest model of ``site``; empty before it has sent one."""
    return arrays_below(f"{SILO}{site}/", state.arrays)
