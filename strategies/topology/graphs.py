"""Topologies: the sites that exchange models, and the weights that mix the models.

The mixing matrix W of a topology is doubly stochastic in every round: row i holds the weights of
site i's own model and of its in-neighbours' models (Lian et al. 2017). ``hub`` and ``graph`` have
Metropolis-Hastings weights (Xiao, Boyd, Kim 2007). A ``star`` has a server in the middle, which
sends everyone the mean of all (W = J, all 1 / n). A ``ring`` has (A + I) / 2 (Marfoq et al. 2020).
``matcha`` is in ``strategies/topology/matcha.py``. All computations use the sites' positions among
their sorted names, because sets of names have a different order in each process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np

from fedsilo.core.errors import SettingError
from fedsilo.strategies.topology.matcha import Matcha, Matrix, solve_matcha

if TYPE_CHECKING:
    from fedsilo.datasets.partition.silo_sets import SiloSet


_KINDS = ("complete", "ring", "star", "hub", "matcha", "graph")


@dataclass(frozen=True, eq=False)
class Topology:
    """The graph of a run: which sites send each other models, and the weights for mixing them."""

    kind: str  # complete, ring, star, hub, matcha or graph
    sites: tuple[str, ...]  # sorted names
    # An arc j -> i means that i receives j's model (in matcha: in some
    # rounds); its ``weight`` is the entry of ``weights``
    graph: nx.DiGraph
    weights: Matrix  # the mixing matrix, (sites, sites); in matcha the expected one
    seed: int  # seeds matcha's draws
    budget: float  # matcha's budget
    # The matchings, their probabilities and the step size; None for other kinds
    matcha: Matcha | None = None

    def matrix(self, round_: int) -> Matrix:
        """Return the mixing matrix of a round, (sites, sites).

        Row i has the weights that site i gives the models of all sites. ``round_`` matters only for
        "matcha", which draws new links in each round.
        """
        if self.matcha:
            return self.matcha.matrix(self.matcha.active(round_))
        return self.weights

    def mixing(self, site: str, round_: int) -> dict[str, float]:
        """Return the weights of ``site`` for its own and its in-neighbours' models, by site name.

        The weights sum to 1. The site itself is always included, even if its weight is 0.
        ``round_`` matters only for "matcha", whose matrix differs between rounds.
        """
        row = self.matrix(round_)[self.sites.index(site)].tolist()
        weights: dict[str, float] = {}
        for name, weight in zip(self.sites, row, strict=True):
            if weight > 0 or name == site:
                weights[name] = weight
        return weights

    def in_neighbours(self, site: str, round_: int) -> list[str]:
        """Return the other sites whose models ``site`` receives in a round, sorted.

        These are the sites to whose models it gives a weight above 0.
        """
        return [name for name in self.mixing(site, round_) if name != site]


def build_topology(
    kind: str, sites: Iterable[str], silo_set: SiloSet | None, seed: int, budget: float
) -> Topology:
    """Build the topology of a run: which sites exchange models, and how each site mixes them.

    Args:
        kind: the rule for the links between sites:
            - "complete": all pairs of sites.
            - "ring": a directed ring along a short tour.
            - "star": all sites with the server, for which one site stands.
            - "hub": all sites with one site in the middle.
            - "graph": the known links.
            - "matcha": in each round random matchings of the known links, or of all pairs if no
              link is known.
        sites: the names of the run's sites, in any order.
        silo_set: the known links and their latencies, or None. The latencies decide the order of a
            ring and the site in the middle of a hub.
        seed: the seed of matcha's random draws.
        budget: the mean share of matchings that a round of matcha uses.

    Raises:
        SettingError: in one of these cases:
            - The kind is unknown, or there are fewer than 2 sites.
            - The silo set does not have exactly these sites, or its links do not connect them.
            - "graph" has no links.
            - The budget of "matcha" is too small, or its solver finds no optimum.
    """
    names = tuple(sorted(sites))
    _refuse(kind, names, silo_set)
    base = link_graph(names, silo_set)
    matcha = None
    if kind == "matcha":
        if not base.number_of_edges():
            base = nx.complete_graph(len(names))
        matcha = solve_matcha(base, budget, seed)
        arcs, weights = base.to_directed().edges, matcha.expected_matrix()
    else:
        arcs, weights = _BUILDERS[kind](base)
    graph = nx.DiGraph()
    graph.add_nodes_from(names)
    for j, i in sorted(arcs):
        graph.add_edge(names[j], names[i], weight=float(weights[i, j]))
    return Topology(kind, names, graph, weights, seed, budget, matcha)


def link_graph(names: tuple[str, ...], silo_set: SiloSet | None) -> nx.Graph:
    """Return the silo set's links as an undirected graph of the positions in ``names``.

    Each edge has ``latency`` in milliseconds and ``gbps``. A value that the silo set does not state
    is None. If ``silo_set`` is None, the graph has nodes but no edges.
    """
    graph = nx.Graph()
    graph.add_nodes_from(range(len(names)))
    if silo_set is None:
        return graph
    for (a, b), link in sorted(silo_set.links.items()):
        ends = sorted((names.index(a), names.index(b)))
        graph.add_edge(*ends, latency=link.latency_ms, gbps=link.gbps)
    return graph


def _refuse(kind: str, names: tuple[str, ...], silo_set: SiloSet | None) -> None:
    if kind not in _KINDS:
        raise SettingError(f"'topology' is '{kind}': choose one of {', '.join(_KINDS)}")
    if len(names) < 2:
        present = f"{len(names)} ({', '.join(names)})"
        raise SettingError(
            f"topology '{kind}' connects at least 2 silos, but this run has "
            f"{present.removesuffix(' ()')}: add silos, or choose method 'local'"
        )
    if silo_set is not None:
        _refuse_silo_set(names, silo_set)
    if kind == "graph" and not (silo_set and silo_set.links):
        raise SettingError(
            "topology 'graph' takes its edges from 'split.silo-set', which has no edges: give a "
            "file with edges, or choose another topology"
        )


def _refuse_silo_set(names: tuple[str, ...], silo_set: SiloSet) -> None:
    unknown = sorted(set(silo_set.names) - set(names))
    if unknown:
        raise SettingError(
            f"'split.silo-set' names {', '.join(unknown)}, but no node of this run has that name: "
            f"its sites are {', '.join(names)}"
        )
    missing = sorted(set(names) - set(silo_set.names))
    if missing:
        raise SettingError(
            f"'split.silo-set' does not have the site(s) {', '.join(missing)} of this run: add "
            f"them, or choose a silo set of {len(names)} silos"
        )
    # Silos of different parts of a graph would never agree
    parts = []
    for part in sorted(nx.connected_components(link_graph(names, silo_set)), key=min):
        parts.append(", ".join(names[place] for place in sorted(part)))
    if silo_set.links and len(parts) > 1:
        raise SettingError(
            f"'split.silo-set' is not connected, it falls into {len(parts)} parts: "
            f"{' | '.join(parts)}; add links between them"
        )


# Each builder takes the graph of known links, which has no edges if none are known
_Built = tuple[Iterable[tuple[int, int]], Matrix]


def _complete(base: nx.Graph) -> _Built:
    size = len(base)
    return nx.complete_graph(size, nx.DiGraph).edges, np.full((size, size), 1 / size)


def _build_ring(base: nx.Graph) -> _Built:
    """Connect the sites to a directed ring along a short tour, and return its arcs and weights.

    ``_find_tour`` finds the tour from the latencies. Arcs are pairs (from, to) of positions, and
    weights are (sites, sites). Each site weighs its own model and that of the site before it by
    1/2.
    """
    order = _find_tour(base)
    arcs = list(zip(order, [*order[1:], order[0]], strict=True))
    weights = np.eye(len(order)) / 2
    for j, i in arcs:
        weights[i, j] = 0.5
    return arcs, weights


def _build_star(base: nx.Graph) -> _Built:
    """Connect all sites to one site that stands for the server, and return arcs and weights.

    The site and the arcs are those of ``_build_hub``. All weights are 1 / n for n sites, because
    the server computes the mean of all models.
    """
    arcs, _ = _build_hub(base)
    return arcs, np.full((len(base), len(base)), 1 / len(base))


def _build_hub(base: nx.Graph) -> _Built:
    """Connect all sites to a hub: the site with the smallest maximum latency to any other site.

    Latencies are those of the quickest paths. If several sites have the smallest maximum, the first
    of them by name is the hub. If the latencies are not known, it is the first of all sites.

    Returns:
        The arcs in both directions, and their weights from ``_weigh_edges``.
    """
    latencies = _path_latencies(base)
    hub = 0
    if latencies is not None:
        hub = int(latencies.max(axis=1).argmin())  # argmin takes the first of equals
    graph = nx.Graph()
    for place in range(len(base)):
        if place != hub:
            graph.add_edge(hub, place)
    return _weigh_edges(graph)


def _weigh_edges(graph: nx.Graph) -> _Built:
    """Return each edge as two arcs, and the Metropolis-Hastings mixing matrix (sites, sites).

    An edge between sites of degrees a and b weighs 1 / (1 + max(a, b)). The weight of a site's own
    model makes its row sum to 1.
    """
    size = len(graph)
    weights = np.zeros((size, size))
    for a, b in graph.edges:
        weights[a, b] = weights[b, a] = 1 / (1 + max(graph.degree[a], graph.degree[b]))
    # Each row then sums to 1, and by symmetry each column does too
    np.fill_diagonal(weights, 1 - weights.sum(axis=1))
    return graph.to_directed().edges, weights


_BUILDERS: dict[str, Callable[[nx.Graph], _Built]] = {
    "complete": _complete,
    "ring": _build_ring,
    "star": _build_star,
    "hub": _build_hub,
    "graph": _weigh_edges,
}


def _path_latencies(base: nx.Graph) -> Matrix | None:
    """Return the total latency of the quickest path between any two sites, in milliseconds.

    The matrix is (sites, sites). Two sites without a path get 0. If no link is known, or if the
    latency of any link is unknown, the result is None.
    """
    known = [latency is not None for _, _, latency in base.edges(data="latency")]
    if not known or not all(known):
        return None
    latencies = np.zeros((len(base), len(base)))
    for start, lengths in nx.all_pairs_dijkstra_path_length(base, weight="latency"):
        for end, length in lengths.items():
            latencies[start, end] = length
    return latencies


def _find_tour(base: nx.Graph) -> list[int]:
    """Return the positions of the sites in the order of a short closed tour that begins at 0.

    The tour is Christofides' tour or the one that always goes to the nearest unvisited site,
    whichever is shorter. Its direction is the one in which the second site has a lower position
    than the last. If the latency of any link is not known, the sites are in the order of their
    names.
    """
    latencies = _path_latencies(base)
    if latencies is None:
        return list(range(len(base)))
    graph = nx.complete_graph(len(base))
    for a, b in graph.edges:
        graph[a][b]["weight"] = latencies[a, b]
    tours = [
        nx.approximation.christofides(graph)[:-1],
        nx.approximation.greedy_tsp(graph, source=0)[:-1],
    ]
    tour: list[int] = min(tours, key=lambda tour: nx.path_weight(graph, [*tour, tour[0]], "weight"))
    # A tour has no beginning or direction, so both are fixed to get one result for one graph
    start = tour.index(0)
    tour = tour[start:] + tour[:start]
    if tour[1] > tour[-1]:
        return [0, *reversed(tour[1:])]
    return tour
