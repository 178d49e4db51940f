"""FedEFM: neighbours train a silo's model on their data, and the silo distils the results.

Every round after the first has two phases. ``overseas``, down and up: ``visitor/<owner>/<array>``
for each silo that has this one as a neighbour. ``distil``, down: ``model/<array>`` (Theta) and
``expert/<host>/<array>``, the silo's own model as each neighbour has trained it; up: the silo's own
arrays by state-dict name, and metrics ``closeness-from-<host>``. The first round is a decentralised
``train`` without neighbours.

FedAvg sends two models per round and silo. The overseas phase adds 2 |N(i)|, out and back, and
because the server relays, the |N(i)| experts are sent down once more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

from fedsilo.core.array_names import arrays_below, by_site, with_prefix
from fedsilo.core.messages import DISTIL, SECONDS, TRAIN, TRAINED, measurement
from fedsilo.models.maths.earth_movers import refuse_large
from fedsilo.models.methods.cross import metric_from
from fedsilo.models.methods.decentralised import MODEL
from fedsilo.models.methods.fedefm import (
    CLOSENESS,
    EXPERT,
    OVERSEAS,
    VISITOR,
    FedEFMSettings,
    map_tokens,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.strategies.loop.ask import Replies
from fedsilo.strategies.loop.method import Ask, Disclosures, Reply, State
from fedsilo.strategies.methods.decentralised import Decentralised, silo_model
from fedsilo.strategies.wire.records import NDArray

_DOCUMENT = "closeness.json"

Edges = Mapping[str, float]  # "owner<-host" -> mean closeness


@dataclass(frozen=True)
class FedEFMState(State):
    """The silos' models, their mean (Theta), and the closeness of the models that visited hosts."""

    # Round -> "owner<-host" -> mean closeness of the model that the host trained
    closeness: Mapping[str, Edges] = field(default_factory=dict)


class FedEFM(Decentralised):
    """Relays models to neighbours and back, and averages the models that silos distil."""

    settings: FedEFMSettings
    state_class = FedEFMState

    def initial_state(self) -> Any:
        """Return the state before round 1: the starting weights, common to all silos.

        The arrays are named ``model/<array>``.

        Raises:
            SettingError: the graph of neighbouring silos cannot be built, a file of weights is not
                usable, or the network's feature map is too large for 'fedefm.emd-solver'
                "cvxpylayers".
        """
        if self.settings.emd_solver == "cvxpylayers":
            network = build_classifier(self.common, self.shape)
            refuse_large(map_tokens(network, self.shape.input_shape, self.settings))
        return super().initial_state()

    def round(self, state: FedEFMState, ask: Ask) -> FedEFMState:
        """Let neighbours train each silo's model, and let the silo distil the results.

        In round 1 each silo trains only its own model. Each later round has two phases:

        - ``overseas``: each silo's model goes to the silo's in-neighbours in the topology, which
          train it on their data and return it.
        - ``distil``: each silo receives these trained copies, learns from them, and returns its new
          model.

        A copy that is not returned in ``overseas`` is missing in ``distil``. A silo without a
        usable reply in ``distil`` keeps its earlier model. If 'fedefm.visit' is "average", each
        silo instead mixes its model with its neighbours' models and trains the mixture.
        """
        if self.settings.visit == "average":
            return cast(FedEFMState, super().round(state, ask))
        send: dict[str, dict[str, NDArray]] = {}
        visitors: dict[str, dict[str, NDArray]] = {}  # the models that each host trains
        for site in ask.sites:
            send[site] = self.theta_for(site, state, ask)
            visitors[site] = self._visitors_of(site, state)
        expected = dict.fromkeys(ask.sites, self.model(state))
        if not state.round:
            return self._next_state(state, ask(TRAIN, send, expect=expected))
        visited = ask(OVERSEAS, {host: models for host, models in visitors.items() if models})
        self._time_visits(visited)
        # Each owner gets its own model back from every neighbour that has trained it
        for host, reply in visited.items():
            for owner, expert in by_site(arrays_below(VISITOR, reply.arrays)).items():
                send[owner] |= with_prefix(f"{EXPERT}{host}/", expert)
        return self._next_state(state, ask(DISTIL, send, expect=expected))

    def theta_for(self, site: str, state: State, ask: Ask) -> dict[str, NDArray]:
        """Return Theta, the mean of the silos' models, as ``model/<array>`` if ``site`` needs it.

        If 'continue-from' is "mean", every silo needs Theta in every round. With another value, a
        silo needs Theta if it stores no state yet, or if sites measure in the next round. A silo
        that does not need Theta gets no arrays.
        """
        if self.settings.continue_from == "mean":
            return with_prefix(MODEL, self.model(state))
        return super().theta_for(site, state, ask)

    def _visitors_of(self, host: str, state: State) -> dict[str, NDArray]:
        """Return the models that visit ``host`` in the next round, to train on the host's data.

        A silo's model visits the silo's in-neighbours, the silos with an arc to it in the topology.
        A silo that has no model yet is left out.

        Returns:
            The models' arrays, named ``visitor/<owner>/<array>``.
        """
        models: dict[str, NDArray] = {}
        # The arc host -> owner says that the owner gets the host's knowledge, so the owner's model
        # travels the other way: to the host
        for owner in self.participants.sites():
            if host in self.topology.in_neighbours(owner, state.round + 1):
                models |= with_prefix(f"{VISITOR}{owner}/", silo_model(owner, state))
        return models

    def _next_state(self, state: FedEFMState, replies: Replies) -> FedEFMState:
        """Return the state with the silos' new models, their mean, and this round's closeness.

        Each silo owns a model, of which other silos, the hosts, have trained copies. Closeness
        compares the feature maps of the owner's model with those of a host's copy. A site computes
        values from 0 to 1, where 1 means equal maps. The owner's reply has one value for each host.
        The state's ``closeness`` maps the round's number, as a string, to "owner<-host" -> value. A
        host that the reply does not name is left out.
        """
        edges = {}
        for owner, reply in replies.items():
            for host in self.participants.sites():
                key = measurement(TRAINED, "train", metric_from(CLOSENESS, host))
                if key in reply.metrics:
                    edges[f"{owner}<-{host}"] = reply.metrics[key]
        after: FedEFMState = self.with_models(state, replies)
        return replace(after, closeness={**state.closeness, str(state.round + 1): edges})

    def _time_visits(self, replies: Mapping[str, Reply]) -> None:
        for host, reply in replies.items():
            total, count = self._visits.get(host, (0.0, 0))
            # Only names are read, because the arrays may lie in a file
            owners = {name.split("/")[1] for name in reply.arrays}
            seconds = reply.metrics.get(SECONDS, 0.0)
            self._visits[host] = (total + seconds, count + len(owners))

    @cached_property
    def _visits(self) -> dict[str, tuple[float, int]]:
        """The work of each host, a site that has trained visiting models in this process.

        Host -> (total seconds of its ``overseas`` phases, number of models trained).
        """
        return {}

    def visit_seconds(self) -> Mapping[str, float] | None:
        """Return each site's mean seconds to train one visiting model.

        A visiting model is another silo's model. The seconds are those measured in this process. A
        site that trained no visiting model gets the mean over the sites that did. If no site did,
        all values are 0.
        """
        known = {site: total / count for site, (total, count) in self._visits.items()}
        mean = sum(known.values()) / max(1, len(known))
        return dict.fromkeys(self.participants.sites(), mean) | known

    def documents(
        self, state: FedEFMState, values: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Any]:
        """Return the content of ``topology.json`` and ``closeness.json`` by file name.

        ``topology.json`` has the graph of silos and the times of its rounds. ``closeness.json`` has
        "owner<-host" -> round -> closeness. Closeness compares the owner's model with the copy that
        the host trained. A site computes values from 0 to 1, where 1 means equal feature maps. If
        ``state.closeness`` has no rounds, ``closeness.json`` is left out. If its rounds have no
        values, as after round 1, ``closeness.json`` is an empty mapping. The argument ``values``
        has the sites' metrics, and is not used.
        """
        documents = super().documents(state, values)
        if state.closeness:
            edges: dict[str, dict[str, float]] = {}
            for round_, row in state.closeness.items():
                for edge, closeness in row.items():
                    edges.setdefault(edge, {})[round_] = closeness
            documents[_DOCUMENT] = dict(sorted(edges.items()))
        return documents

    def disclosures(self) -> Disclosures:
        """Describe the data that a silo sends, as sentences for ``privacy.json``.

        A silo sends its own model and, from round 2 on, the neighbours' models that it trained. It
        also sends how close its model is to each copy that a neighbour trained. If 'fedefm.visit'
        is "average", it sends only its own model.
        """
        own = super().disclosures()
        if self.settings.visit == "average":
            return own
        return own.also(
            "each round after the first: the models of its neighbours in the topology "
            f"'{self.kind()}', trained on this silo's data; each goes back to its own silo",
            "each round after the first: the mean closeness of the silo's model to each copy of it "
            "that a neighbour trained",
        )
