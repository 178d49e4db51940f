"""FedEFM: silos' models are trained at their neighbours', come back and are distilled from.

A round after the first has two phases. Messages of ``overseas``, down and up:
``visitor/<owner>/<array>`` of each silo that has this one as neighbour. Of ``distil``, down:
``model/<array>`` (Theta) and ``expert/<host>/<array>``, the silo's own model as each neighbour has
trained it; up: the silo's own arrays by state-dict name, and metrics ``closeness-from-<host>``. The
first round is a decentralised ``train`` without neighbours.

Against FedAvg's two models a round and silo, overseas takes 2 |N(i)| more, out and back; and as the
server relays, the |N(i)| experts come down once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from fedsilo.models.contract.messages import DISTIL, SECONDS, TRAIN, TRAINED, measurement
from fedsilo.models.contract.notes import Notes
from fedsilo.models.maths.earth_movers import refuse_large
from fedsilo.models.methods.cross import metric_from
from fedsilo.models.methods.fedefm import (
    CLOSENESS,
    EXPERT,
    OVERSEAS,
    VISITOR,
    FedEFMSettings,
    map_tokens,
)
from fedsilo.models.networks.kinds import Task
from fedsilo.strategies.loop.initial_arrays import starting_network
from fedsilo.strategies.loop.reporting import Disclosures
from fedsilo.strategies.loop.state import ArraySpec, RoundState, SiteReply
from fedsilo.strategies.methods.decentralised import SILO, Decentralised, below
from fedsilo.strategies.wire.records import NDArray

_BACK = "back/"  # back/<owner>/<host>/<array>, between the two phases of a round
_DOCUMENT = "closeness.json"


class FedEFM(Decentralised):
    """Relays models to neighbours and back, and takes the mean of what silos distil."""

    settings: FedEFMSettings
    title = "FedEFM"

    def disclosures(self) -> Disclosures:
        """Name own and visiting models, and the closeness."""
        where = f"in the topology '{self.kind()}'"
        return Disclosures(
            "all weights and batch-norm statistics of the silo's own model, each round; they go to "
            f"its neighbours {where} {self.as_sent()}, and their mean over all silos to all silos",
            f"each round after the first: the models of its neighbours {where}, trained on "
            f"this silo's data; each goes back {self.as_sent()} to the silo that it is of",
            "each round after the first: the mean closeness of each of them to the silo's model",
        )

    def initial_state(self, task: Task) -> RoundState:
        """Return the weights that every silo starts from.

        Raises:
            SettingError: the topology is none, or the network's map is too large for
            'fedefm.emd-solver'.
        """
        if self.settings.emd_solver == "cvxpylayers":
            network = starting_network(self.common, task)
            refuse_large(map_tokens(network, task.input_shape, self.settings))
        return super().initial_state(task)

    def phases(self, state: RoundState) -> Sequence[str]:
        """Return local training for the first round, then overseas and distil."""
        return (OVERSEAS, DISTIL) if state.round else (TRAIN,)

    def recipients(self, phase: str, state: RoundState) -> list[str]:
        """Return all silos, and overseas those that have visitors."""
        sites = self.participants.sites()
        return [site for site in sites if phase != OVERSEAS or self._visitors(site, state)]

    def outgoing(self, phase: str, site: str, state: RoundState) -> Mapping[str, NDArray]:
        """Return the visitors, or Theta where it is needed and the silo's experts."""
        if phase == OVERSEAS:
            return self.relayed(phase, site, state)
        return super().outgoing(phase, site, state)

    def relayed(self, phase: str, site: str, state: RoundState) -> dict[str, NDArray]:
        """Return what others have sent for ``site``: visitors overseas, experts to distil from."""
        arrays: dict[str, NDArray] = {}
        if phase == OVERSEAS:
            for owner in self._visitors(site, state):
                arrays |= below(f"{SILO}{owner}/", state, f"{VISITOR}{owner}/")
        elif phase == DISTIL:
            arrays = below(f"{_BACK}{site}/", state, EXPERT)
        return arrays

    def notes(self, phase: str, site: str, state: RoundState) -> Notes:
        """Tell nothing: models are not mixed."""
        return Notes()

    def expected(self, phase: str, site: str, state: RoundState) -> Mapping[str, ArraySpec]:
        """Expect the visitors, trained, or the silo's own model."""
        own = super().expected(phase, site, state)
        if phase != OVERSEAS:
            return own
        owners = self._visitors(site, state)
        return {f"{VISITOR}{o}/{name}": spec for o in owners for name, spec in own.items()}

    def combine(
        self, phase: str, state: RoundState, replies: Mapping[str, SiteReply]
    ) -> RoundState:
        """Sort what was trained overseas by owner; then take the silos' models and Theta.

        What the silos did not distil from, since they failed, goes with the round.
        """
        if phase != OVERSEAS:
            combined = super().combine(phase, state, replies)
            return RoundState(state.round, combined.arrays, self._with_weights(combined, replies))
        self._take_visits(replies, state)
        arrays = dict(state.arrays)
        for host, reply in replies.items():
            for owner in self._visitors(host, state):
                for name in self.model(state):
                    array = reply.array(f"{VISITOR}{owner}/{name}")
                    arrays[f"{_BACK}{owner}/{host}/{name}"] = array
        return RoundState(state.round, arrays, state.extras)

    def documents(
        self, state: RoundState, values: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Any]:
        """Return the topology, and the closeness: "owner<-host" -> round -> mean."""
        documents = super().documents(state, values)
        if closeness := state.extras.get(CLOSENESS):
            edges = sorted({edge for row in closeness.values() for edge in row})
            documents[_DOCUMENT] = {
                edge: {round_: row[edge] for round_, row in closeness.items() if edge in row}
                for edge in edges
            }
        return documents

    def visit_seconds(self) -> Mapping[str, float] | None:
        """Return how long each site trains one visitor; what has hosted none, as the mean site."""
        known = {site: total / count for site, (total, count) in self._visits.items()}
        mean = sum(known.values()) / max(1, len(known))
        return {site: known.get(site, mean) for site in self.participants.sites()}

    @cached_property
    def _visits(self) -> dict[str, tuple[float, int]]:
        """Seconds of overseas messages by host, and of how many visitors."""
        return {}

    def _take_visits(self, replies: Mapping[str, SiteReply], state: RoundState) -> None:
        for host, reply in replies.items():
            total, count = self._visits.get(host, (0.0, 0))
            more = len(self._visitors(host, state))
            self._visits[host] = (total + reply.metric(SECONDS), count + more)

    def _needs_theta(self, site: str, state: RoundState) -> bool:
        """Tell whether Theta is needed: in every round if silos go on from it."""
        return self.settings.continue_from == "mean" or super()._needs_theta(site, state)

    def _visitors(self, host: str, state: RoundState) -> list[str]:
        """Return whose models ``host`` trains in the round after ``state``."""
        owners = [site for site in self.participants.sites() if self.has_model(site, state)]
        return [o for o in owners if host in self.topology.in_neighbours(o, state.round + 1)]

    def _with_weights(self, state: RoundState, replies: Mapping[str, SiteReply]) -> dict[str, Any]:
        """Return the extras with this round's closeness: round -> "owner<-host" -> mean."""
        closeness = {}
        for owner, reply in replies.items():
            metrics = reply.metrics()
            for host in self.participants.sites():
                key = measurement(TRAINED, "train", metric_from(CLOSENESS, host))
                if key in metrics:
                    closeness[f"{owner}<-{host}"] = metrics[key]
        earlier = dict(state.extras.get(CLOSENESS, {}))
        return {**state.extras, CLOSENESS: {**earlier, str(state.round + 1): closeness}}
