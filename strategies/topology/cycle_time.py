"""The time of a round over a topology, from link speeds, model size and the sites' computing times.

Marfoq et al. 2020, "Throughput-optimal topology design for cross-silo federated learning", eq. 3:
an arc i -> j takes compute(i) + latency(i, j) + bits / min(line / links out of i, line / links into
j, capacity of the path), because all transfers of a site at one time share the site's own line. A
round ends with its slowest arc, as fedsilo's rounds are synchronous. Marfoq et al. also give a time
for rounds where a site waits only for its own neighbours: the largest mean delay of a circuit.
It is never larger; on a directed ring it is the mean over the arcs instead of the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from fedsilo.core.errors import SettingError
from fedsilo.models.methods.decentralised import LinkSettings
from fedsilo.strategies.topology.graphs import Topology, build_topology, link_graph
from fedsilo.strategies.topology.matcha import Matrix

if TYPE_CHECKING:
    from fedsilo.datasets.partition.silo_sets import SiloSet

_COMPARED = ("complete", "ring", "star", "matcha")

Arcs = NDArray[np.bool_]  # (sites, sites), true if the first sends to the second


@dataclass(frozen=True, eq=False)
class Links:
    """The links between the sites of a run, the same in both directions."""

    latency: Matrix  # seconds until the first bit arrives, (sites, sites)
    gbps: Matrix  # the capacity of the path, (sites, sites)
    access_gbps: float  # the capacity of a site's own line


def resolve_links(
    sites: tuple[str, ...], silo_set: SiloSet | None, settings: LinkSettings
) -> Links:
    """Return latency and capacity between all pairs of ``sites``, and their access capacity.

    Latencies (seconds) and capacities (Gbit/s) are (sites, sites). Two sites with a direct link
    always use it. Two sites without one use the path of the lowest total latency, with the capacity
    of its slowest link. Two sites without any path get latency 0 and infinite capacity.
    ``settings`` gives the values that a link does not state, and the capacity of every site's
    access line. If no links are known, every pair has a link with these values.
    """
    graph = link_graph(sites, silo_set)
    if not graph.number_of_edges():
        graph = nx.complete_graph(len(sites))
    assumed = {"latency": settings.link_latency_ms, "gbps": settings.link_gbps}
    for _, _, link in graph.edges(data=True):
        for key, value in assumed.items():
            if link.get(key) is None:
                link[key] = value
    shape = (len(sites), len(sites))
    latency, gbps = np.zeros(shape), np.full(shape, np.inf)
    for start, paths in nx.all_pairs_dijkstra_path(graph, weight="latency"):
        for end, path in paths.items():
            hops = list(nx.utils.pairwise(path))  # none from a site to itself
            if graph.has_edge(start, end):
                hops = [(start, end)]
            milliseconds = 0
            for hop in hops:
                link = graph.edges[hop]
                milliseconds += link["latency"]
                gbps[start, end] = min(gbps[start, end], link["gbps"])
            latency[start, end] = milliseconds / 1000
    return Links(latency, gbps, settings.access_gbps)


def cycle_time(
    topology: Topology,
    links: Links,
    model_bytes: int,
    compute_seconds: Mapping[str, float],
    visit_seconds: Mapping[str, float] | None = None,
) -> float:
    """Return the seconds that a round takes over a topology.

    Sending a model takes the latency of the link plus bits / speed. The models that a site sends at
    one time share its access line equally, and so do the models that it receives.

    Without visiting models, sites compute and then send their models to their neighbours. In a star
    they send them to the hub, which sends the mean back. With visiting models, each model first
    travels to its site's in-neighbours. These train their visitors one after another and send them
    back, and then all sites compute. For "matcha", which draws links in each round, the result is
    the expected seconds.

    Args:
        topology: the neighbours of each site.
        links: the links between the topology's sites.
        model_bytes: the bytes of a model on the wire.
        compute_seconds: site -> seconds that the site computes in a round.
        visit_seconds: site -> seconds that the site trains one visiting model. None or empty if no
            models visit other sites.
    """
    compute = np.array([compute_seconds[site] for site in topology.sites])
    visits = None
    if visit_seconds:
        visits = np.array([visit_seconds[site] for site in topology.sites])
    seconds = _Seconds(links, 8 * model_bytes, compute, visits)
    if topology.matcha is not None:
        # Each round draws its matchings, so its expected time is the mean over the cases
        expected = 0.0
        for share, active in topology.matcha.cases():
            expected += share * seconds.round(topology.matcha.matrix(active) > 0)
        return expected
    # ``weight=None`` counts every arc as 1, so that an arc of weight 0 is kept
    arcs = nx.to_numpy_array(topology.graph, nodelist=topology.sites, weight=None) > 0
    if topology.kind == "star" and visits is None:
        return seconds.star(arcs)
    return seconds.round(arcs)


@dataclass(frozen=True, eq=False)
class _Seconds:
    """Computes the seconds of a round over given links.

    Attributes:
        links: the links between the sites.
        bits: the bits of a model on the wire.
        compute: the seconds that each site computes in a round, (sites,).
        visits: the seconds in which each site trains one visiting model, (sites,). None if no
            models visit other sites.
    """

    links: Links
    bits: int
    compute: NDArray[np.float64]
    visits: NDArray[np.float64] | None = None

    def round(self, arcs: Arcs) -> float:
        """Return the seconds of a synchronous round, which ends when the slowest site is done.

        ``arcs`` is True where the first site sends to the second. ``visits`` has the seconds that
        each site trains one visiting model. If it is None, every site computes and then sends its
        model. Otherwise models visit other sites, the hosts, and the round takes the longest visit
        plus the longest computing time. An arc then leads from a host to the owner of the visiting
        model. A visit is the transfer to the host, the training of all the host's visitors, and the
        transfer back. Transfers run at the same time and share the sites' access lines
        (``transfer``).
        """
        if self.visits is None:
            return self.mixing(arcs)
        # The arc host -> owner is the way back, so a host has as many visitors as arcs leave it
        out, back = self.transfer(arcs.T).T, self.transfer(arcs)
        hosted = self.visits * _without_self_arcs(arcs).sum(axis=1)
        away = np.where(_without_self_arcs(arcs), out + hosted[:, None] + back, 0.0)
        return float(away.max() + self.compute.max())

    def mixing(self, arcs: Arcs) -> float:
        """Return the seconds until every site has computed and then sent its model over its arcs.

        Sites work in parallel. A site without outgoing arcs only computes.
        """
        delays = self.compute[:, None] + self.transfer(arcs)
        return float(np.where(_without_self_arcs(arcs), delays, self.compute[:, None]).max())

    def star(self, arcs: Arcs) -> float:
        """Return the seconds to compute, send the models to the hub, and send their mean back.

        The hub is the site with the most incoming arcs. If several sites have the most, it is the
        first of them. Only sites with an arc to the hub send it their model and receive the mean.
        Other sites only compute.
        """
        arcs = _without_self_arcs(arcs)
        # Every arc of a star leads to or from the hub, so most arcs enter there
        hub = int(arcs.sum(axis=0).argmax())
        uplinks = np.zeros_like(arcs)
        uplinks[:, hub] = arcs[:, hub]
        return self.mixing(uplinks) + float(self.transfer(uplinks.T)[hub].max())

    def transfer(self, arcs: Arcs) -> Matrix:
        """Return the seconds to send one model over each arc, (senders, receivers).

        The seconds are latency + bits / speed, or 0 where there is no arc. All transfers that leave
        a site share its access line equally, and so do all transfers that enter it. The speed is
        the lowest of the sender's share, the receiver's share and the capacity of the path.
        """
        arcs, line = _without_self_arcs(arcs), self.links.access_gbps
        # All transfers of a site at one time share its own line
        sending = np.maximum(1, arcs.sum(axis=1))[:, None]
        receiving = np.maximum(1, arcs.sum(axis=0))[None, :]
        gbps = np.minimum(np.minimum(line / sending, line / receiving), self.links.gbps)
        return np.where(arcs, self.links.latency + self.bits / (gbps * 1e9), 0.0)


def _without_self_arcs(arcs: Arcs) -> Arcs:
    """Return a copy of ``arcs`` in which no site has an arc to itself."""
    return arcs & ~np.eye(len(arcs), dtype=bool)


def topology_document(
    topology: Topology,
    silo_set: SiloSet | None,
    settings: LinkSettings,
    model_bytes: int,
    compute_seconds: Mapping[str, float] | None,
    visit_seconds: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Build the content of topology.json: the graph, its mixing weights, and the times of rounds.

    ``edges`` has the graph and ``mixing`` the weights. ``cycle-times`` has the seconds of a round
    by kind of topology. The kinds are the run's own, complete, ring, star and matcha, all over the
    same links. A kind that cannot be built is left out. ``cycle-times`` is empty if
    ``compute_seconds`` is None or empty.

    Args:
        topology: the run's topology.
        silo_set: the known links between the sites, or None.
        settings: the latency and capacity of a link that states none.
        model_bytes: the bytes of a model on the wire.
        compute_seconds: site -> seconds that the site computes in a round.
        visit_seconds: site -> seconds that the site trains another site's model. None or empty if
            sites do not train models of other sites.
    """
    links = resolve_links(topology.sites, silo_set, settings)
    cycle_times: dict[str, float] = {}
    # Without computing times, no round time can be compared
    if compute_seconds:
        for kind, other in _build_alternatives(topology, silo_set).items():
            seconds = cycle_time(other, links, model_bytes, compute_seconds, visit_seconds)
            cycle_times[kind] = seconds
    return {
        "kind": topology.kind,
        "sites": list(topology.sites),
        "edges": _edges(topology, links),
        "mixing": topology.weights.tolist(),
        **_matcha(topology),
        "model-bytes": model_bytes,
        "compute-seconds": _in_order(compute_seconds, topology.sites),
        "visit-seconds": _in_order(visit_seconds, topology.sites),
        "access-gbps": links.access_gbps,
        "cycle-times": cycle_times,
    }


def _in_order(seconds: Mapping[str, float] | None, sites: Iterable[str]) -> dict[str, float] | None:
    """Return the seconds of ``sites`` in the order of ``sites``, or None if none are known."""
    if not seconds:
        return None
    return {site: seconds[site] for site in sites}


def _edges(topology: Topology, links: Links) -> list[dict[str, Any]]:
    edges = []
    for sender, receiver, weight in sorted(topology.graph.edges(data="weight")):
        hop = topology.sites.index(sender), topology.sites.index(receiver)
        edges.append(
            {
                "from": sender,
                "to": receiver,
                "weight": weight,
                "latency-ms": 1000 * float(links.latency[hop]),
                "gbps": float(links.gbps[hop]),
            }
        )
    return edges


def _matcha(topology: Topology) -> dict[str, Any]:
    matcha, sites = topology.matcha, topology.sites
    if matcha is None:
        return {}
    matchings = []
    for matching in matcha.matchings:
        matchings.append([[sites[a], sites[b]] for a, b in matching])
    return {
        "matchings": matchings,
        "probabilities": list(matcha.probabilities),
        "alpha": matcha.alpha,
        "budget": topology.budget,
    }


def _build_alternatives(topology: Topology, silo_set: SiloSet | None) -> dict[str, Topology]:
    """Return ``topology`` by its kind, and beside it other kinds of topology to compare it with.

    The other kinds are complete, ring, star and matcha. All connect the same sites over the same
    known links. A kind that cannot be built, for example because matcha's budget is too small, is
    left out.
    """
    alternatives = {}
    sites, seed, budget = topology.sites, topology.seed, topology.budget
    for kind in dict.fromkeys([*_COMPARED, topology.kind]):
        if kind == topology.kind:
            alternatives[kind] = topology
            continue
        # A budget too small for matcha must not prevent the document
        with suppress(SettingError):
            alternatives[kind] = build_topology(kind, sites, silo_set, seed, budget)
    return alternatives
