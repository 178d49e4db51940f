from collections.abc import Iterable
from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.core.errors import SettingError
from fedsilo.datasets.partition.silo_sets import Link, SiloSet, open_silo_set
from fedsilo.strategies.topology.graphs import Topology, build_topology
from tests.support.errors import refuses

KINDS = ("complete", "ring", "star", "hub", "matcha")
SQUARE = {"ab": 2.0, "ac": 1.0, "ad": 1.0, "bc": 1.0, "bd": 1.0, "cd": 2.0}


def silo_set(links: dict[str, float | None] | Iterable[str], names: str = "") -> SiloSet:
    """Links by the letters of their ends, with or without milliseconds."""
    known = links if isinstance(links, dict) else dict.fromkeys(links)
    found = names or "".join(sorted({letter for pair in known for letter in pair}))
    return SiloSet(tuple(found), {(pair[0], pair[1]): Link(ms) for pair, ms in known.items()})


def build(
    kind: str, sites: Iterable[str], links: SiloSet | None = None, budget: float = 0.5
) -> Topology:
    return build_topology(kind, sites, links, seed=7, budget=budget)


def doubly_stochastic(matrix: np.ndarray) -> bool:
    sums = np.concatenate([matrix.sum(axis=0), matrix.sum(axis=1)])
    return bool(matrix.min() >= 0 and np.allclose(sums, 1, atol=1e-12))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(KINDS), st.integers(2, 9), st.integers(1, 1000))
def test_the_mixing_matrix_of_every_round_is_doubly_stochastic(
    kind: str, size: int, round_: int
) -> None:
    topology = build(kind, [f"s{place}" for place in range(size)])
    assert doubly_stochastic(topology.matrix(round_))
    assert doubly_stochastic(topology.weights)


@pytest.mark.parametrize("kind", [*KINDS, "graph"])
def test_a_sites_mixing_is_its_row_of_the_matrix_and_names_itself_and_its_neighbours(
    kind: str,
) -> None:
    topology = build(kind, "dacb", silo_set(["ab", "bc", "cd"]))
    for round_, (row, site) in product((1, 2, 3), enumerate("abcd")):
        mixing = topology.mixing(site, round_)
        assert list(mixing) == sorted([site, *topology.in_neighbours(site, round_)])
        assert sum(mixing.values()) == pytest.approx(1)
        matrix = topology.matrix(round_)
        assert mixing == {s: w for s, w in zip("abcd", matrix[row], strict=True) if s in mixing}


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_in_which_sites_are_given_changes_nothing(kind: str) -> None:
    one, other = build(kind, ["b", "c", "a"]), build(kind, ["a", "b", "c"])
    assert one.sites == other.sites == ("a", "b", "c")
    assert (one.matrix(4) == other.matrix(4)).all()
    assert list(one.graph.edges(data=True)) == list(other.graph.edges(data=True))


def test_in_a_complete_topology_each_takes_the_mean_of_all() -> None:
    assert (build("complete", "abcd").matrix(1) == 0.25).all()


def test_on_a_ring_each_receives_from_its_predecessor_alone() -> None:
    topology = build("ring", "cab")
    assert [topology.in_neighbours(site, 1) for site in "abc"] == [["c"], ["a"], ["b"]]
    assert topology.matrix(1).tolist() == [[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]]
    assert set(topology.graph.edges) == {("a", "b"), ("b", "c"), ("c", "a")}, "from -> to"


def test_a_ring_of_two_is_an_exchange() -> None:
    topology = build("ring", "ab")
    assert [topology.in_neighbours(site, 1) for site in "ab"] == [["b"], ["a"]]
    assert (topology.matrix(1) == 0.5).all()


def test_a_ring_follows_the_quick_links() -> None:
    topology = build("ring", "abcd", silo_set(SQUARE))  # ab and cd are the slow diagonals
    assert set(topology.graph.edges) == {("a", "c"), ("c", "b"), ("b", "d"), ("d", "a")}


def test_where_a_latency_is_not_known_the_ring_is_in_the_order_of_names() -> None:
    topology = build("ring", "abcd", silo_set(SQUARE | {"ab": None}))
    assert set(topology.graph.edges) == {("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=4, max_size=6))
def test_a_rings_tour_is_at_most_half_as_long_again_as_the_shortest(
    points: list[tuple[int, int]],
) -> None:
    names = "abcdef"[: len(points)]
    far = {
        names[i] + names[j]: float(np.hypot(*np.subtract(points[i], points[j])))
        for i, j in combinations(range(len(points)), 2)
    }
    length = {pair: far["".join(sorted(pair))] for pair in permutations(names, 2)}
    shortest = min(
        sum(length[step] for step in zip(tour, (*tour[1:], tour[0]), strict=True))
        for tour in permutations(names)
    )
    topology = build("ring", names, silo_set(dict(far)))
    assert sum(length[arc] for arc in topology.graph.edges) <= 1.5 * shortest + 1e-9


def test_the_tour_of_gaia_is_the_shortest() -> None:
    gaia = open_silo_set("gaia")
    topology = build("ring", gaia.names, gaia)
    links = [gaia.link(*arc) for arc in topology.graph.edges]
    assert sum(link.latency_ms or 0 for link in links if link) == pytest.approx(525.57, abs=0.01)


def test_after_a_round_of_a_star_every_silo_has_the_mean_of_all() -> None:
    topology = build("star", "abcd")
    models = np.array([[1.0], [2.0], [3.0], [6.0]])
    assert (topology.matrix(1) @ models).tolist() == [[3.0]] * 4
    assert np.linalg.norm(topology.matrix(1) - np.full((4, 4), 1 / 4), 2) == 0
    assert sorted(topology.graph.edges) == sorted(build("hub", "abcd").graph.edges)


def test_a_hub_has_metropolis_weights_around_the_first_site() -> None:
    topology = build("hub", "cab")
    third = pytest.approx(1 / 3)
    assert topology.mixing("a", 1) == {"a": third, "b": third, "c": third}
    assert topology.mixing("b", 1) == {"a": third, "b": pytest.approx(2 / 3)}


def test_a_hub_is_the_site_whose_slowest_link_is_the_quickest() -> None:
    links = silo_set({"ab": 9.0, "ac": 5.0, "ad": 5.0, "bc": 6.0, "bd": 9.0, "cd": 6.0})
    assert build("hub", "abcd", links).in_neighbours("c", 1) == ["a", "b", "d"]


def test_a_hub_reaches_over_other_sites_where_there_is_no_link() -> None:
    links = silo_set({"ab": 5.0, "bc": 5.0, "cd": 5.0, "de": 5.0})
    assert build("hub", "abcde", links).in_neighbours("c", 1) == ["a", "b", "d", "e"]


def test_a_graph_has_the_silo_sets_edges_with_metropolis_weights() -> None:
    topology = build("graph", "abc", silo_set(["bc", "ab"]))
    expected = np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3
    assert topology.matrix(1) == pytest.approx(expected)
    assert topology.in_neighbours("b", 1) == ["a", "c"]


def test_matcha_draws_from_the_silo_sets_edges_or_else_from_all() -> None:
    line = build("matcha", "abcd", silo_set(["ab", "bc", "cd"]))
    assert line.matcha is not None
    assert sorted(len(matching) for matching in line.matcha.matchings) == [1, 2]
    assert {"".join(sorted(arc)) for arc in line.graph.edges} == {"ab", "bc", "cd"}
    assert line.graph.number_of_edges() == 6
    assert build("matcha", "abcd").graph.number_of_edges() == 12


def test_matchas_neighbours_are_those_of_the_rounds_matchings() -> None:
    topology = build("matcha", "abcd", silo_set(["ab", "bc", "cd"]))
    assert topology.matcha is not None
    met = set()
    for round_ in range(1, 21):
        used = [
            edge
            for on, matching in zip(
                topology.matcha.active(round_), topology.matcha.matchings, strict=True
            )
            for edge in matching
            if on
        ]
        for place, site in enumerate("abcd"):
            others = sorted("abcd"[a + b - place] for a, b in used if place in (a, b))
            assert topology.in_neighbours(site, round_) == others
        met.add(len(used))
    assert len(met) > 1, "rounds differ"


def test_the_expected_weights_of_matcha_are_the_mean_over_rounds() -> None:
    topology = build("matcha", "abc")
    mean = np.mean([topology.matrix(round_) for round_ in range(1, 1501)], axis=0)
    assert mean == pytest.approx(topology.weights, abs=0.03)


def test_an_arc_has_the_weight_with_which_its_end_takes_its_start() -> None:
    topology = build("graph", "abcd", silo_set(["ab", "bc", "bd", "cd"]))
    for j, i, weight in topology.graph.edges(data="weight"):
        assert weight == topology.weights["abcd".index(i), "abcd".index(j)]


@pytest.mark.parametrize("kind", [*KINDS, "graph"])
@pytest.mark.parametrize(("sites", "said"), [([], "has 0"), (["solo"], r"has 1 \(solo\)")])
def test_fewer_than_two_silos_are_refused(kind: str, sites: list[str], said: str) -> None:
    with pytest.raises(SettingError, match=f"'{kind}' connects at least 2 silos, .*{said}"):
        build(kind, sites)


@pytest.mark.parametrize("kind", [*KINDS, "graph"])
def test_links_that_leave_silos_apart_are_refused_and_the_parts_named(kind: str) -> None:
    links = silo_set(["ad", "bc"], "abcde")
    with pytest.raises(SettingError, match=r"not connected, .* 3 parts: a, d \| b, c \| e; add"):
        build(kind, "abcde", links)


def test_a_silo_that_no_node_has_is_named() -> None:
    with refuses(SettingError, "split.silo-set"):
        build("ring", "ab", silo_set(["ab", "bx", "xz"]))


def test_a_site_that_the_silo_set_does_not_have_is_named() -> None:
    with pytest.raises(SettingError, match=r"does not have the site\(s\) c of this run.* 3 silos"):
        build("complete", "abc", silo_set(["ab"]))


@pytest.mark.parametrize("links", [None, SiloSet(("a", "b"), {})])
def test_a_graph_without_edges_is_refused(links: SiloSet | None) -> None:
    with refuses(SettingError, "graph", "split.silo-set"):
        build("graph", "ab", links)


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with refuses(SettingError, "torus"):
        build("torus", "ab")
