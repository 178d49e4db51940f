import json
from typing import Any

import pytest

from fedsilo.datasets.partition.silo_sets import Link, SiloSet, open_silo_set
from fedsilo.models.methods.decentralised import LinkSettings
from fedsilo.strategies.topology.cycle_time import cycle_time, resolve_links, topology_document
from fedsilo.strategies.topology.graphs import Topology, build_topology

GIGABIT = 125_000_000  # bytes: a second at 1 Gbps
DEFAULTS = LinkSettings(access_gbps=100.0, link_gbps=1.0, link_latency_ms=10.0)


def build(kind: str, sites: str, links: SiloSet | None = None, budget: float = 0.5) -> Topology:
    return build_topology(kind, sites, links, seed=7, budget=budget)


def seconds(
    topology: Topology,
    settings: LinkSettings = DEFAULTS,
    links: SiloSet | None = None,
    compute: dict[str, float] | None = None,
    **more: Any,
) -> float:
    found = resolve_links(topology.sites, links, settings)
    work = compute or dict.fromkeys(topology.sites, 2.0)
    return cycle_time(topology, found, GIGABIT, work, **more)


@pytest.mark.parametrize("kind", ["complete", "ring", "graph"])
def test_a_round_is_computing_then_latency_then_transfer(kind: str) -> None:
    links = SiloSet(("a", "b"), {("a", "b"): Link()})
    assert seconds(build(kind, "ab", links)) == pytest.approx(2 + 0.01 + 1)


def test_a_line_is_shared_by_all_that_a_site_sends_at_once() -> None:
    narrow = LinkSettings(access_gbps=1.0, link_gbps=1.0, link_latency_ms=10.0)
    assert seconds(build("ring", "abcd"), narrow) == pytest.approx(2 + 0.01 + 1)
    assert seconds(build("complete", "abcd"), narrow) == pytest.approx(2 + 0.01 + 3)


def test_the_slowest_arc_ends_the_round() -> None:
    links = SiloSet(
        ("a", "b", "c"),
        {("a", "b"): Link(10, 1), ("b", "c"): Link(500, 0.25), ("a", "c"): Link(10, 1)},
    )
    assert seconds(build("graph", "abc", links), links=links) == pytest.approx(2 + 0.5 + 4)
    late = {"a": 9.0, "b": 0.0, "c": 0.0}
    assert seconds(build("graph", "abc", links), links=links, compute=late) == pytest.approx(10.01)


def test_a_ring_waits_for_its_slowest_arc_not_for_the_mean_one() -> None:
    compute = {"a": 1.0, "b": 5.0, "c": 1.0}
    assert seconds(build("ring", "abc"), compute=compute) == pytest.approx(5 + 1.01)


def test_a_star_gathers_at_its_hub_and_sends_back() -> None:
    shared = LinkSettings(access_gbps=3.0, link_gbps=10.0, link_latency_ms=10.0)
    # three spokes share the hub's 3 Gbps: a second each, up and down
    assert seconds(build("star", "abcd"), shared) == pytest.approx(2 + 1.01 + 1.01)
    busy = {"a": 7.0, "b": 2.0, "c": 2.0, "d": 2.0}
    assert seconds(build("star", "abcd"), shared, compute=busy) == pytest.approx(7 + 1.01)


def test_matchas_metrics_is_the_mean_over_rounds_with_and_without_an_exchange() -> None:
    assert seconds(build("matcha", "ab")) == pytest.approx(0.5 * 2 + 0.5 * 3.01, abs=1e-5)
    assert seconds(build("matcha", "ab", budget=1.0)) == pytest.approx(3.01, abs=1e-5)


def test_matchas_sites_share_their_lines_between_the_links_of_a_round_alone() -> None:
    links = SiloSet(("a", "b", "c"), {("a", "b"): Link(), ("b", "c"): Link()})
    narrow = LinkSettings(access_gbps=1.0, link_gbps=1.0, link_latency_ms=0.0)
    found = seconds(build("matcha", "abc", links), narrow, links)
    # a quarter of the rounds each: no link, one, the other, both at once over b's line
    assert found == pytest.approx((2 + 3 + 3 + 4) / 4, abs=1e-4)


def test_overseas_the_host_trains_between_out_and_back_and_all_wait_for_it() -> None:
    visits, home = {"a": 1.0, "b": 5.0, "c": 1.0}, {"a": 3.0, "b": 0.5, "c": 0.5}
    found = seconds(build("ring", "abc"), compute=home, visit_seconds=visits)
    assert found == pytest.approx(1.01 + 5 + 1.01 + 3)


@pytest.mark.parametrize(("slow", "expected"), [("a", 13.0), ("b", 11.0), ("c", 11.0)])
def test_a_silo_visits_the_one_that_it_receives_from(slow: str, expected: float) -> None:
    # Receiving goes a -> b -> c -> a, so b's model visits a, over the slow link
    links = SiloSet(
        ("a", "b", "c"),
        {("a", "b"): Link(1000, 8), ("b", "c"): Link(0, 8), ("a", "c"): Link(0, 8)},
    )
    ring = build("ring", "abc", links)
    assert [ring.in_neighbours(site, 1) for site in "abc"] == [["c"], ["a"], ["b"]]
    visits = dict.fromkeys("abc", 0.75) | {slow: 9.75}
    home = dict.fromkeys("abc", 1.0)
    found = seconds(ring, links=links, compute=home, visit_seconds=visits)
    # out and back take 0.125 s each by the bytes, over a-b a second more
    assert found == pytest.approx(expected)


def test_a_host_trains_its_visitors_one_after_another() -> None:
    home, visits = dict.fromkeys("abcd", 1.0), dict.fromkeys("abcd", 2.0)
    ring = seconds(build("ring", "abcd"), compute=home, visit_seconds=visits)
    complete = seconds(build("complete", "abcd"), compute=home, visit_seconds=visits)
    assert ring == pytest.approx(1.01 + 2 + 1.01 + 1)
    assert complete == pytest.approx(1.01 + 3 * 2 + 1.01 + 1)


def test_overseas_goes_straight_over_each_link_of_a_star() -> None:
    home, visits = dict.fromkeys("abc", 1.0), dict.fromkeys("abc", 2.0)
    found = seconds(build("star", "abc"), compute=home, visit_seconds=visits)
    assert found == pytest.approx(1.01 + 2 * 2 + 1.01 + 1), "the hub hosts two"


def test_where_there_is_no_link_a_model_takes_the_quickest_path() -> None:
    links = SiloSet(
        ("a", "b", "c", "d"),
        {
            ("a", "b"): Link(10, 1),
            ("b", "c"): Link(20, 0.5),
            ("a", "d"): Link(40, 9),
            ("c", "d"): Link(40, 9),
        },
    )
    found = resolve_links(("a", "b", "c", "d"), links, DEFAULTS)
    assert found.latency[0, 2] == found.latency[2, 0] == pytest.approx(0.03)
    assert found.gbps[0, 2] == 0.5, "the narrowest of the path"


def test_sites_with_a_link_use_it_even_if_a_detour_is_quicker() -> None:
    links = SiloSet(
        ("a", "b", "c"), {("a", "b"): Link(1), ("b", "c"): Link(1), ("a", "c"): Link(50)}
    )
    found = resolve_links(("a", "b", "c"), links, DEFAULTS)
    assert found.latency[0, 2] == pytest.approx(0.05)


def test_what_a_link_leaves_open_is_as_the_settings_say() -> None:
    links = SiloSet(("a", "b", "c"), {("a", "b"): Link(0.0, None), ("b", "c"): Link(None, 4.0)})
    found = resolve_links(("a", "b", "c"), links, DEFAULTS)
    assert (found.latency[0, 1], found.gbps[0, 1]) == (0.0, 1.0)
    assert (found.latency[1, 2], found.gbps[1, 2]) == (pytest.approx(0.01), 4.0)
    every = resolve_links(("a", "b"), None, DEFAULTS)
    assert every.latency[0, 1] == pytest.approx(0.01)


def test_a_model_of_no_bytes_costs_latency_alone() -> None:
    topology = build("ring", "ab")
    links = resolve_links(topology.sites, None, DEFAULTS)
    assert cycle_time(topology, links, 0, {"a": 0.0, "b": 0.0}) == pytest.approx(0.01)


def document(kind: str, links: SiloSet | None = None, budget: float = 0.5) -> dict[str, Any]:
    topology = build(kind, "abc", links, budget)
    work = {"a": 2.0, "b": 2.0, "c": 2.0}
    return topology_document(topology, links, DEFAULTS, GIGABIT, work)


def test_the_document_has_the_edges_with_their_weights_and_links() -> None:
    found = document("ring")
    assert found["edges"][0] == {
        "from": "a",
        "to": "b",
        "weight": 0.5,
        "latency-ms": pytest.approx(10),
        "gbps": 1.0,
    }
    assert found["mixing"] == [[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]]
    assert "matchings" not in found
    assert json.loads(json.dumps(found)) == found


def test_without_times_the_document_has_the_graph_alone() -> None:
    topology = build("ring", "abc", None, 0.5)
    found = topology_document(topology, None, DEFAULTS, GIGABIT, None)
    whole = document("ring")
    assert found["cycle-times"] == {}
    assert found["compute-seconds"] is None
    assert {key for key in whole if found[key] != whole[key]} == {"cycle-times", "compute-seconds"}


def test_the_document_compares_topologies_over_the_same_links() -> None:
    times = document("ring")["cycle-times"]
    assert list(times) == ["complete", "ring", "star", "matcha"]
    assert times["ring"] == times["complete"] == pytest.approx(3.01)
    assert times["star"] == pytest.approx(4.02)
    assert 2 < times["matcha"] < 3.01


def test_the_document_of_a_graph_has_its_own_time_too() -> None:
    links = SiloSet(("a", "b", "c"), {("a", "b"): Link(), ("b", "c"): Link(990)})
    times = document("graph", links)["cycle-times"]
    assert list(times)[-1] == "graph"
    assert times["graph"] == pytest.approx(2 + 0.99 + 1)


def test_the_document_of_matcha_has_what_it_draws_from() -> None:
    found = document("matcha")
    assert found["matchings"] == [[["a", "b"]], [["a", "c"]], [["b", "c"]]]
    assert found["probabilities"] == pytest.approx([0.5] * 3, abs=1e-5)
    assert found["alpha"] == pytest.approx(0.4, abs=1e-5)
    assert found["budget"] == 0.5
    assert found["mixing"][0] == pytest.approx([0.6, 0.2, 0.2], abs=1e-5), "the expected one"


def test_a_topology_that_cannot_be_built_is_left_out_of_the_comparison() -> None:
    assert "matcha" not in document("ring", budget=1e-9)["cycle-times"]


def test_among_the_gaia_silos_a_ring_beats_a_star() -> None:
    gaia = open_silo_set("gaia")
    topology = build_topology("ring", gaia.names, gaia, seed=0, budget=0.5)
    work = dict.fromkeys(topology.sites, 1.0)
    settings = LinkSettings(access_gbps=1.0)
    times = topology_document(topology, gaia, settings, GIGABIT, work)["cycle-times"]
    assert times["ring"] < times["matcha"] < times["complete"] < times["star"]
