"""What a round over a topology takes, from link speeds, the model's bytes and the sites' computing.

Marfoq et al. 2020, "Throughput-optimal topology design for cross-silo federated learning", eq. 3:
an arc i -> j takes compute(i) + latency(i, j) + bits / min(line / links out of i, line / links into
j, capacity of the path), for a site's own line is shared by all that it sends or receives at once.

A round is over when the slowest arc is: fedsilo's rounds are synchronous. Marfoq et al.'s figure
for rounds in which nobody waits but for its own neighbours, the largest mean delay of a circuit, is
never larger; on a directed ring it is the mean over the arcs in place of the largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.methods.decentralised import LinkSettings
from fedsilo.strategies.topology.graphs import Topology, build_topology, link_graph
from fedsilo.strategies.topology.matcha import Matrix

if TYPE_CHECKING:
    from fedsilo.datasets.partition.silo_sets import SiloSet

_COMPARED = ("complete", "ring", "star", "matcha")

Arcs = NDArray[np.bool_]  # (from, to)


@dataclass(frozen=True, eq=False)
class Links:
    """What is between the sites of a run, the same in both directions."""

    latency: Matrix  # seconds until the first bit, (sites, sites)
    gbps: Matrix  # what the path carries, (sites, sites)
    access_gbps: float  # a site's own line


def resolve_links(
    sites: tuple[str, ...], silo_set: SiloSet | None, settings: LinkSettings
) -> Links:
    """Return the links between sorted ``sites``.

    Sites that have no link with each other use the quickest path over the others, as quick as its
    links together and as wide as the narrowest. What a link leaves open is as ``settings`` say, and
    without a silo set each pair has a link.
    """
    graph = link_graph(sites, silo_set)
    if not graph.number_of_edges():
        graph = nx.complete_graph(len(sites))
    open_ = {"latency": settings.link_latency_ms, "gbps": settings.link_gbps}
    for _, _, link in graph.edges(data=True):
        link.update({key: value for key, value in open_.items() if link.get(key) is None})
    shape = (len(sites), len(sites))
    latency, gbps = np.zeros(shape), np.full(shape, np.inf)
    for start, paths in nx.all_pairs_dijkstra_path(graph, weight="latency"):
        for end, path in paths.items():
            hops = [(start, end)] if graph.has_edge(start, end) else nx.utils.pairwise(path)
            used = [graph.edges[hop] for hop in hops if start != end]
            latency[start, end] = sum(link["latency"] for link in used) / 1000
            gbps[start, end] = min((link["gbps"] for link in used), default=np.inf)
    return Links(latency, gbps, settings.access_gbps)


def cycle_time(
    topology: Topology,
    links: Links,
    model_bytes: int,
    compute_seconds: Mapping[str, float],
    visit_seconds: Mapping[str, float] | None = None,
) -> float:
    """Return the seconds of a round, of matcha the expected ones.

    Args:
        topology: who sends to whom.
        links: of the topology's sites.
        model_bytes: what a model weighs on the wire.
        compute_seconds: site -> how long it computes at home in a round.
        visit_seconds: site -> how long it trains one visiting model. None: sites compute, then
            send to their neighbours; of a star to the server and back.
            Else FedEFM's: each site's model goes out to the sites that it would receive from, is
            trained there one after another, and comes back; when all are back, sites compute.
    """
    compute = np.array([compute_seconds[site] for site in topology.sites])
    visits = np.array([visit_seconds[site] for site in topology.sites]) if visit_seconds else None
    seconds = _Seconds(links, 8 * model_bytes, compute, visits)
    if topology.matcha is not None:
        return sum(
            share * seconds.round(topology.matcha.matrix(active) > 0)
            for share, active in topology.matcha.cases()
        )
    arcs = nx.to_numpy_array(topology.graph, nodelist=topology.sites, weight=None) > 0
    if topology.kind == "star" and visits is None:
        return seconds.star(arcs)
    return seconds.round(arcs)


@dataclass(frozen=True, eq=False)
class _Seconds:
    """Seconds over given links; ``compute`` and ``visits`` are (sites,)."""

    links: Links
    bits: int
    compute: NDArray[np.float64]
    visits: NDArray[np.float64] | None = None

    def round(self, arcs: Arcs) -> float:
        """Return what a synchronous round takes: its slowest arc, and no less than computing."""
        if self.visits is None:
            return self.mixing(arcs)
        # The arc host -> owner is the way back; a host has as many visitors as arcs leave it
        out, back = self.transfer(arcs.T).T, self.transfer(arcs)
        hosted = self.visits * _others(arcs).sum(axis=1)
        away = np.where(_others(arcs), out + hosted[:, None] + back, 0.0)
        return float(away.max() + self.compute.max())

    def mixing(self, arcs: Arcs) -> float:
        """Return the seconds of a round in which sites compute and then send."""
        delays = self.compute[:, None] + self.transfer(arcs)
        return float(np.where(_others(arcs), delays, self.compute[:, None]).max())

    def star(self, arcs: Arcs) -> float:
        """Return what it takes to gather models at the hub and to send them back out."""
        arcs = _others(arcs)
        hub = int(arcs.sum(axis=0).argmax())
        uplinks = np.zeros_like(arcs)
        uplinks[:, hub] = arcs[:, hub]
        return self.mixing(uplinks) + float(self.transfer(uplinks.T)[hub].max())

    def transfer(self, arcs: Arcs) -> Matrix:
        """Return the seconds of each of the ``arcs``, (from, to); 0 where there is none."""
        arcs, line = _others(arcs), self.links.access_gbps
        sending = np.maximum(1, arcs.sum(axis=1))[:, None]
        receiving = np.maximum(1, arcs.sum(axis=0))[None, :]
        gbps = np.minimum(np.minimum(line / sending, line / receiving), self.links.gbps)
        return np.where(arcs, self.links.latency + self.bits / (gbps * 1e9), 0.0)


def _others(arcs: Arcs) -> Arcs:
    """Return the arcs that leave their site."""
    return arcs & ~np.eye(len(arcs), dtype=bool)


def topology_document(
    topology: Topology,
    silo_set: SiloSet | None,
    settings: LinkSettings,
    model_bytes: int,
    compute_seconds: Mapping[str, float] | None,
    visit_seconds: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the content of topology.json: the graph, its weights, and what rounds would take.

    ``cycle-times`` has this topology and each other one that can be built over the same links, and
    none where it is not known how long sites compute.
    """
    links = resolve_links(topology.sites, silo_set, settings)

    def by_site(seconds: Mapping[str, float] | None) -> dict[str, float] | None:
        return {site: seconds[site] for site in topology.sites} if seconds else None

    return {
        "kind": topology.kind,
        "sites": list(topology.sites),
        "edges": _edges(topology, links),
        "mixing": topology.weights.tolist(),
        **_matcha(topology),
        "model-bytes": model_bytes,
        "compute-seconds": by_site(compute_seconds),
        "visit-seconds": by_site(visit_seconds),
        "access-gbps": links.access_gbps,
        "cycle-times": {
            kind: cycle_time(other, links, model_bytes, compute_seconds, visit_seconds)
            for kind, other in _alternatives(topology, silo_set).items()
        }
        if compute_seconds
        else {},
    }


def _edges(topology: Topology, links: Links) -> list[dict[str, Any]]:
    places = {site: place for place, site in enumerate(topology.sites)}
    return [
        {
            "from": j,
            "to": i,
            "weight": weight,
            "latency-ms": 1000 * float(links.latency[places[j], places[i]]),
            "gbps": float(links.gbps[places[j], places[i]]),
        }
        for j, i, weight in sorted(topology.graph.edges(data="weight"))
    ]


def _matcha(topology: Topology) -> dict[str, Any]:
    if (matcha := topology.matcha) is None:
        return {}
    sites = topology.sites
    return {
        "matchings": [[[sites[a], sites[b]] for a, b in matching] for matching in matcha.matchings],
        "probabilities": list(matcha.probabilities),
        "alpha": matcha.alpha,
        "budget": topology.budget,
    }


def _alternatives(topology: Topology, silo_set: SiloSet | None) -> dict[str, Topology]:
    """Return the topologies to compare, this one among them."""
    alternatives = {}
    for kind in dict.fromkeys([*_COMPARED, topology.kind]):
        try:
            alternatives[kind] = (
                topology
                if kind == topology.kind
                else build_topology(kind, topology.sites, silo_set, topology.seed, topology.budget)
            )
        except SettingError:
            continue  # a budget too small for matcha is not a reason to have no document
    return alternatives
