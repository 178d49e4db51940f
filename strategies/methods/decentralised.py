"""Silos that continue from their own models; the server only relays models between neighbours.

Flower is a star, so everything that one silo sends to another passes the server. The server keeps
only the newest model of each silo, for the next round and the checkpoint.

Messages down: ``model/<array>`` (the consensus model Theta, if it is measured or starts a silo),
``neighbour/<site>/<array>`` for each in-neighbour in the round, and ``note.mixing``, the silo's row
of the mixing matrix as JSON. Messages up: the silo's own trained arrays by state-dict name. Theta
is the mean of theta_i over the silos that finished the round (vartheta_i of FedEFM, part 3), all
with the same weight.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from fedsilo.core.array_names import arrays_below, with_prefix
from fedsilo.core.messages import SECONDS, TRAIN
from fedsilo.datasets.partition.silo_sets import open_silo_set
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
    """Lets each silo mix its model with its neighbours' and train; a subclass names the topology.

    A state holds Theta as ``model/<array>`` and the newest model of each silo as
    ``silo/<site>/<array>``.
    """

    settings: LinkSettings
    capabilities = Capabilities(initial_weights=True)

    def kind(self) -> str:
        """Return the topology's kind; "star" becomes "hub", a star around a silo."""
        return among_silos(str(getattr(self.settings, "topology", self.common.method)))

    @cached_property
    def topology(self) -> Topology:
        """The neighbours and mixing weights of each silo."""
        silo_set = open_silo_set(self.common.silo_set) if self.common.silo_set else None
        budget = float(getattr(self.settings, "matcha_budget", 1.0))
        return build_topology(
            self.kind(), self.participants.sites(), silo_set, self.common.seed, budget
        )

    def initial_state(self) -> Any:
        """Check the topology and return the weights from which every silo starts.

        Raises:
            SettingError: the topology is not connected, or names other silos than take part.
        """
        self.topology  # noqa: B018  # fails here, so that a bad topology stops the run early
        return self.state_class(with_prefix(MODEL, self.starting_weights()))

    def round(self, state: Any, ask: Ask) -> Any:
        """Let each silo mix its neighbours' models with its own and train the mixture."""
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
        """Return Theta for the final evaluation.

        A finished run's state holds only Theta, by plain names.
        """
        return with_prefix(MODEL, self.model(state) or state.arrays)

    def model(self, state: State) -> dict[str, NDArray]:
        """Return Theta."""
        return arrays_below(MODEL, state.arrays)

    def theta_for(self, site: str, state: State, ask: Ask) -> dict[str, NDArray]:
        """Return Theta if the site measures it or starts from it in this round; else empty."""
        measured = self.common.measures_in(state.round + 1)
        needed = measured or site not in ask.stateful_sites
        return with_prefix(MODEL, self.model(state)) if needed else {}

    def neighbours_models(self, site: str, state: State) -> dict[str, NDArray]:
        """Return the models that ``site`` receives from its in-neighbours in this round."""
        arrays: dict[str, NDArray] = {}
        for other in self.topology.in_neighbours(site, state.round + 1):
            arrays |= with_prefix(f"{NEIGHBOUR}{other}/", silo_model(other, state))
        return arrays

    def with_models(self, state: Any, trained: Replies) -> Any:
        """Return the state with the silos' new models and with their mean as Theta."""
        theta = self.average(trained, self.model(state), equal=True)
        arrays = {n: array for n, array in state.arrays.items() if n.startswith(SILO)}
        for site, reply in trained.items():
            arrays |= with_prefix(f"{SILO}{site}/", {name: reply.arrays[name] for name in theta})
        self.time(trained)
        return replace(state, arrays=arrays | with_prefix(MODEL, theta))

    def time(self, replies: Mapping[str, Reply]) -> None:
        """Add up the training time of each silo."""
        for site, reply in replies.items():
            total, count = self._seconds.get(site, (0.0, 0))
            self._seconds[site] = (total + reply.metrics.get(SECONDS, 0.0), count + 1)

    @cached_property
    def _seconds(self) -> dict[str, tuple[float, int]]:
        """For each silo the total seconds of training, and the number of messages they are from."""
        return {}

    def visit_seconds(self) -> Mapping[str, float] | None:
        """Return the seconds that each site trains one visiting model; None without visits."""
        return None

    def documents(self, state: Any, values: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """Return topology.json: the graph, its weights, and cycle times of several graphs."""
        # A process that resumed a run after its last round has no times of the silos
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
        """Describe the weights and their recipients."""
        return Disclosures(
            "all weights and batch-norm statistics of the silo's own model, each round; they go to "
            f"its neighbours in the topology '{self.kind()}', and their mean over all silos to all "
            "silos"
        )


def among_silos(kind: str) -> str:
    """Return the kind of topology without a server: a star becomes a hub around a silo."""
    return "hub" if kind == "star" else kind


def silo_model(site: str, state: State) -> Arrays:
    """Return the newest model of ``site``; empty until it has sent one."""
    return arrays_below(f"{SILO}{site}/", state.arrays)
