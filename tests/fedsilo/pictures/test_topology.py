import io
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from fedsilo.pictures.topology import draw_edge_weights, draw_topology

TIMES = {"complete": 3.0, "ring": 2.5, "star": 4.0}


def edges(*found: tuple[str, str, float], both: bool = False) -> list[dict[str, Any]]:
    arcs = [*found, *((end, start, weight) for start, end, weight in found if both)]
    return [{"from": start, "to": end, "weight": weight} for start, end, weight in arcs]


def document(kind: str, sites: str, arcs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "sites": list(sites),
        "edges": arcs,
        "cycle-times": TIMES,
        "model-bytes": 87_000_000,
        "visit-seconds": None,
        **more,
    }


RING = document("ring", "abcd", edges(*((j, i, 0.5) for j, i in ("ac", "cb", "bd", "da"))))
GRAPH = document("graph", "abc", edges(("a", "b", 0.25), ("b", "c", 0.4), both=True))


def panels(found: dict[str, Any]) -> list[Any]:
    metrics = draw_topology(found)
    assert list(metrics) == ["topology.png"]
    return list(metrics["topology.png"].axes)


def arrows(axes: Any) -> list[FancyArrowPatch]:
    return [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]


def texts(axes: Any) -> dict[str, tuple[float, float]]:
    return {text.get_text(): text.get_position() for text in axes.texts}


def test_where_no_times_are_known_the_picture_says_so() -> None:
    _, bars = panels({**RING, "cycle-times": {}})
    assert [text.get_text() for text in bars.texts] == [
        "cycle times: not measured,\nthe run was resumed at its end"
    ]
    assert not bars.patches


def test_a_ring_stands_in_its_order_with_an_arrow_from_each_to_the_next() -> None:
    graph, _ = panels(RING)
    named = texts(graph)
    assert named["a"][1] > 1, "the first above"
    assert named["c"][0] > 1, "the next to the right"
    assert named["b"][1] < -1
    assert len(arrows(graph)) == 4
    assert graph.get_title() == "ring, 4 links: weight 0.5 each"


def test_a_link_both_ways_is_one_line_with_its_weight_on_it() -> None:
    graph, _ = panels(GRAPH)
    assert len(arrows(graph)) == 2
    assert {"0.25", "0.40"} <= set(texts(graph))
    assert graph.get_title() == "graph, 2 links: weights on the lines"
    thin, thick = sorted(line.get_linewidth() for line in arrows(graph))
    assert thin < thick


def test_a_ring_of_two_is_one_line() -> None:
    graph, _ = panels(document("ring", "ab", edges(("a", "b", 0.5), both=True)))
    assert len(arrows(graph)) == 1
    assert graph.get_title() == "ring, 1 link: weight 0.5"


def test_a_stars_hub_stands_in_the_middle() -> None:
    spokes = edges(*(("c", end, 0.25) for end in "abd"), both=True)
    graph, _ = panels(document("star", "abcd", spokes))
    assert texts(graph)["c"] == (0, pytest.approx(-0.14))


def test_weights_of_many_lines_are_in_the_title() -> None:
    sites = "abcdefghijk"
    pairs = [(a, b, 0.05 + 0.01 * (a == "a")) for a in sites for b in sites if a < b]
    found = document("matcha", sites, edges(*pairs, both=True), matchings=[])
    graph, _ = panels(found)
    assert set(texts(graph)) == set(sites)
    assert graph.get_title() == "matcha, 55 links: expected weights 0.05 (thin) to 0.06 (thick)"


def test_the_cycle_times_stand_beside_it_with_the_runs_own_in_another_colour() -> None:
    _, bars = panels(RING)
    assert [bar.get_width() for bar in bars.patches] == list(TIMES.values())
    colours = [bar.get_facecolor() for bar in bars.patches]
    assert colours[0] == colours[2] != colours[1]
    assert set(texts(bars)) == {"3 s", "2.5 s", "4 s"}
    assert bars.get_title() == "cycle time, 87 MB a model, one way"
    assert "seconds" in bars.get_xlabel()


def test_a_round_of_two_exchanges_says_so() -> None:
    _, bars = panels(RING | {"visit-seconds": {"a": 1.0}})
    assert bars.get_title().endswith("out and back")


def saved(figure: Figure) -> int:
    target = io.BytesIO()
    figure.savefig(target, format="png")
    return target.tell()


@pytest.mark.parametrize("found", [RING, GRAPH])
def test_the_picture_can_be_saved(found: dict[str, Any]) -> None:
    assert saved(draw_topology(found)["topology.png"]) > 5000


def test_a_few_edges_are_lines_in_one_panel_over_sorted_rounds() -> None:
    figure = draw_edge_weights({"a<-b": {"10": 0.3, "2": 0.5}, "b<-a": {2: 0.1}})["closeness.png"]
    (axes,) = figure.axes
    first, second = axes.lines
    assert list(first.get_xdata()) == [2, 10]
    assert list(first.get_ydata()) == [0.5, 0.3]
    assert list(second.get_ydata()) == [0.1]
    assert [text.get_text() for text in figure.legends[0].texts] == ["a<-b", "b<-a"]
    assert figure.get_supxlabel() == "round"
    assert "EMD weight" in figure.get_supylabel()
    assert "EMD" in figure.get_suptitle()
    assert saved(figure) > 5000


def test_many_edges_get_a_panel_per_student_and_a_colour_per_teacher() -> None:
    sites = "abcd"
    lines = {f"{i}<-{j}": {2: 0.5, 3: 0.4} for i in sites for j in sites if i != j}
    figure = draw_edge_weights(lines)["closeness.png"]
    shown = [axes for axes in figure.axes if axes.lines]
    assert [axes.get_title() for axes in shown] == [f"student {site}" for site in sites]
    assert [len(axes.lines) for axes in shown] == [3] * 4
    teachers = {line.get_label(): line.get_color() for axes in shown for line in axes.lines}
    assert len(set(teachers.values())) == len(teachers) == 4
    legend = figure.legends[0]
    assert [text.get_text() for text in legend.texts] == list(sites)
    assert [line.get_color() for line in legend.get_lines()] == [teachers[s] for s in sites]


def test_before_the_first_distillation_there_is_an_empty_panel() -> None:
    figure = draw_edge_weights({})["closeness.png"]
    assert len(figure.axes) == 1
    assert not figure.legends
    assert saved(figure) > 1000
