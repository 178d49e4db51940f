"""Silos that continue from their own models; the server only relays models between neighbours.

Flower is a star, so everything that one silo sends to another passes the server. The server keeps
only the newest model of each silo, for the next round and the checkpoint.

Messages down: ``model/<array>`` (Theta, the mean of the silos' models, if a silo measures it or
starts from it), ``neighbour/<site>/<array>`` for each in-neighbour in the round, and
``note.mixing``, the silo's row of the mixing matrix as JSON. Messages up: the silo's own trained
arrays by state-dict name. Theta is the mean of theta_i over the silos that finished the round
(vartheta_i of FedEFM, part 3), all with the same weight.

``CDL`` mixes main models in this way; its support models stay at home, and the silos compute the
contrastive divergence (``client_app/methods/cdl.py``). ``Star`` is the client-server baseline.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from fedsilo.core.array_names import arrays_below, with_prefix
from fedsilo.core.messages import SECONDS, TRAIN
from fedsilo.core.settings.common_settings import AGGREGATIONS
from fedsilo.datasets.partition.silo_sets import SiloSet, open_silo_set
from fedsilo.models.methods.cdl import CDLSettings
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

    A state holds Theta, the mean of the silos' models, as ``model/<array>``. It holds the newest
    model of each silo as ``silo/<site>/<array>``.
    """

    settings: LinkSettings
    capabilities = Capabilities(initial_weights=True)

    def kind(self) -> str:
        """Return the kind of the topology, such as "ring", which tells the silos' neighbours.

        The method's setting 'topology' names it. If the method has no such setting, the kind is the
        method's name. "star" becomes "hub", a star with one of the silos in the middle.
        """
        return among_silos(str(getattr(self.settings, "topology", self.common.method)))

    @cached_property
    def topology(self) -> Topology:
        """The neighbours and mixing weights of each silo."""
        sites, seed = self.participants.sites(), self.common.seed
        budget = float(getattr(self.settings, "matcha_budget", 1.0))
        return build_topology(self.kind(), sites, self._silo_set, seed, budget)

    @cached_property
    def _silo_set(self) -> SiloSet | None:
        """The names of the run's silos and the network links between them, from 'split.silo-set'.

        The value is None if that setting is empty.
        """
        if not self.common.silo_set:
            return None
        return open_silo_set(self.common.silo_set)

    def initial_state(self) -> Any:
        """Return the state before round 1, which has the starting weights that all silos share.

        The arrays are named ``model/<array>``. The topology is built too, because an invalid
        topology must stop the run before round 1.

        Raises:
            SettingError: the topology cannot be built (``build_topology``), or a file of weights is
                missing or belongs to another network.
        """
        self.topology  # noqa: B018  # fails here, so that a bad topology stops the run early
        return self.state_class(with_prefix(MODEL, self.starting_weights()))

    def round(self, state: Any, ask: Ask) -> Any:
        """Let each silo mix its own model with its neighbours' models, and train the mixture.

        The server sends each asked silo its neighbours' models and its weights for mixing them. The
        silo mixes, trains and returns the result. The new state has the trained models, and their
        unweighted mean, Theta. A silo without a usable reply keeps its earlier model and does not
        count in the mean. Theta is also sent to silos that start from it or measure it
        (``theta_for``).
        """
        send: dict[str, Arrays] = {}
        notes: dict[str, MixingNotes] = {}
        for site in ask.sites:
            theta = self.theta_for(site, state, ask)
            send[site] = theta | self.neighbours_models(site, state)
            notes[site] = MixingNotes(self.topology.mixing(site, state.round + 1))
        # Theta is not the start of an update here, so it only says which arrays must return
        expected = dict.fromkeys(ask.sites, self.model(state))
        return self.with_models(state, ask(TRAIN, send, expect=expected, notes=notes))

    def model_for(self, site: str, state: State) -> Arrays:
        """Return Theta, the mean of the silos' models, as ``model/<array>`` for the evaluation.

        All silos get the same arrays, so ``site`` is not used. A state made from a stored model has
        the arrays of Theta without the prefix ``model/``. The prefix is then added.
        """
        return with_prefix(MODEL, self.model(state) or state.arrays)

    def model(self, state: State) -> dict[str, NDArray]:
        """Return Theta, the mean of the silos' models, by plain array names."""
        return arrays_below(MODEL, state.arrays)

    def theta_for(self, site: str, state: State, ask: Ask) -> dict[str, NDArray]:
        """Return Theta, the mean of the silos' models, if ``site`` needs it in the next round.

        A site that is not in ``ask.stateful_sites`` has no model yet, and starts from Theta. Every
        site needs Theta if the next round measures it ('server.evaluate-every'). Otherwise no
        arrays are returned. The arrays are named ``model/<array>``.
        """
        if site in ask.stateful_sites and not self.common.measures_in(state.round + 1):
            return {}
        return with_prefix(MODEL, self.model(state))

    def neighbours_models(self, site: str, state: State) -> dict[str, NDArray]:
        """Return the models that ``site`` receives and mixes in the next round.

        The arrays are named ``neighbour/<site>/<array>``. The topology chooses the sending sites. A
        sender that has never returned a model is left out.
        """
        arrays: dict[str, NDArray] = {}
        for other in self.topology.in_neighbours(site, state.round + 1):
            arrays |= with_prefix(f"{NEIGHBOUR}{other}/", silo_model(other, state))
        return arrays

    def with_models(self, state: Any, trained: Replies) -> Any:
        """Return the state with the silos' newly trained models, and with their mean as Theta.

        All silos that replied have the same weight in Theta. A silo without a reply keeps its
        earlier model, which does not count in Theta. If no silo replied, Theta is unchanged. As a
        side effect, the replies' training seconds are recorded (``add_seconds``).
        """
        theta = self.average(trained, self.model(state), equal=True)
        # A silo that did not answer keeps its model of an earlier round
        arrays = with_prefix(SILO, arrays_below(SILO, state.arrays))
        for site, reply in trained.items():
            for name in theta:
                arrays[f"{SILO}{site}/{name}"] = reply.arrays[name]
        self.add_seconds(trained)
        return replace(state, arrays=arrays | with_prefix(MODEL, theta))

    def add_seconds(self, replies: Mapping[str, Reply]) -> None:
        """Add each reply's training seconds to the total of its silo, and count the reply.

        A reply without seconds adds 0 but is counted, so it lowers the silo's mean.
        """
        for site, reply in replies.items():
            total, count = self._seconds.get(site, (0.0, 0))
            self._seconds[site] = (total + reply.metrics.get(SECONDS, 0.0), count + 1)

    @cached_property
    def _seconds(self) -> dict[str, tuple[float, int]]:
        """For each silo, (total seconds of training, number of replies); see ``add_seconds``."""
        return {}

    def visit_seconds(self) -> Mapping[str, float] | None:
        """Return, by site, the mean seconds in which the site trains one visiting model.

        A visiting model is another silo's model that the site trains (``FedEFM``). The default is
        None, which means that no models visit.
        """
        return None

    def documents(self, state: Any, values: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """Return the content of topology.json: the topology, its mixing weights, and cycle times.

        A cycle time is the duration of a round in seconds. It is computed for the run's topology,
        and for others such as a ring, from the silos' mean training seconds. It is missing if this
        process has not timed every silo, as after resuming a finished run. ``values`` is not used.
        """
        times: dict[str, float] | None = None
        visits: Mapping[str, float] | None = None
        # A process that resumed a run after its last round does not know the silos' times
        if self._seconds.keys() == set(self.participants.sites()):
            times = {site: total / count for site, (total, count) in self._seconds.items()}
            visits = self.visit_seconds()
        size = sum(array.nbytes for array in self.model(state).values())
        document = topology_document(
            self.topology, self._silo_set, self.settings, size, times, visits
        )
        return {_DOCUMENT: document}

    def disclosures(self) -> Disclosures:
        """Describe in one sentence the weights that a silo sends, and the silos that receive them.

        The silo sends all weights of its model in each round. Its neighbours receive the weights.
        All silos receive the mean of all silos' weights. The sentence names the kind of topology.
        """
        return Disclosures(
            "all weights and batch-norm statistics of the silo's own model, each round; they go to "
            f"its neighbours in the topology '{self.kind()}', and their mean over all silos to all "
            "silos"
        )


def among_silos(kind: str) -> str:
    """Return the kind of topology to use for a network of silos without a server.

    The kind "star" needs a server in the middle, so it becomes "hub", a star around one of the
    silos. Any other kind is unchanged.
    """
    if kind == "star":
        return "hub"
    return kind


def silo_model(site: str, state: State) -> Arrays:
    """Return the newest model of ``site``.

    Returns an empty mapping if the site has not sent a model yet.
    """
    return arrays_below(f"{SILO}{site}/", state.arrays)


class CDL(Decentralised):
    """Mixes main models on a ring or on another topology (Do, Nguyen et al. 2023)."""

    settings: CDLSettings

    def kind(self) -> str:
        """Return the topology's kind, 'cdl.divergence-topology', with "hub" in place of "star"."""
        return among_silos(self.settings.divergence_topology)


class Star(Decentralised):
    """Averages the models of all silos, and sends the mean to all: FedEFM's client-server baseline.

    Messages down: ``model/<array>``, Theta, in every round; up: the silo's trained arrays. It is
    FedAvg with equal weights, for comparison with the topologies: its mixing matrix is J, all
    1 / n, and its cycle time has its two hops. The topology ``hub`` is different: there a silo is
    in the middle, and models are mixed by Metropolis weights.
    """

    settings: LinkSettings
    capabilities = Capabilities(initial_weights=True, aggregations=AGGREGATIONS)

    def kind(self) -> str:
        """Return "star", the topology with the server in the middle."""
        return "star"

    def round(self, state: State, ask: Ask) -> State:
        """Let each asked silo train Theta, the common model, and average the results.

        The server sends Theta to each silo. The new Theta is the mean of the returned models, all
        with the same weight. If 'server.aggregation' is neither "mean" nor "auto", that aggregation
        replaces the mean. A silo without a usable reply does not count in the new Theta.
        """
        theta = self.model(state)
        trained = ask(
            TRAIN,
            dict.fromkeys(ask.sites, with_prefix(MODEL, theta)),
            reference=dict.fromkeys(ask.sites, theta),
        )
        self.add_seconds(trained)
        mean = self.average(trained, theta, equal=True)
        return replace(state, arrays=with_prefix(MODEL, mean))

    def disclosures(self) -> Disclosures:
        """List the data sent by a silo: its weights. Other silos get only the mean over silos."""
        return Disclosures(
            "all weights and batch-norm statistics of the silo's own model, each round; "
            "their mean over all silos goes to all silos"
        )
