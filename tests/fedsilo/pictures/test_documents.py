"""Pictures of a router, judged by what their panels show."""

import io
from typing import Any

import pytest

from fedsilo.pictures.documents import draw_buffer, draw_routing, violin_statistics

EXPERTS = ["cleveland", "hungary", "va"]


def metrics_of(*means: float, boxes: bool = True) -> dict[str, dict[str, float]]:
    """Return routing metrics of the experts: quantiles in steps of 0.05 around each mean."""
    steps = {"q05": -0.1, "q25": -0.05, "q50": 0.0, "q75": 0.05, "q95": 0.1}
    return {
        expert: {"mean": mean}
        | ({name: mean + step for name, step in steps.items()} if boxes else {})
        for expert, mean in zip(EXPERTS, means, strict=True)
    }


def document(**sites: dict[str, dict[str, float]]) -> dict[str, Any]:
    apart = [[0.0, 1.5, 2.5], [1.5, 0.0, 3.5], [2.5, 3.5, 0.0]]
    embedded = [[2 * value for value in row] for row in apart]
    return {
        "experts": EXPERTS,
        "sites": sites,
        "prototype distances": {"input": apart, "embedded": embedded},
    }


WHOLE = document(
    cleveland=metrics_of(0.5, 0.25, 0.25),
    hungary=metrics_of(0.2, 0.6, 0.2),
    switzerland=metrics_of(0.3, 0.3, 0.4),  # gave no expert and has patients all the same
)


def labels(ticks: Any) -> list[str]:
    return [tick.get_text() for tick in ticks]


def cells(axes: Any) -> list[list[float]]:
    found: list[list[float]] = axes.images[0].get_array().tolist()
    return found


def shown(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_a_routing_document_makes_three_pictures_that_can_be_saved() -> None:
    found = draw_routing(WHOLE)
    assert set(found) == {"routing.png", "routing-matrix.png", "prototype-distances.png"}
    for figure in found.values():
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
        assert picture.getvalue().startswith(b"\x89PNG")


def test_there_is_a_panel_per_hospital_and_a_violin_per_expert() -> None:
    axes = draw_routing(WHOLE)["routing.png"].axes
    titles = [panel.get_title() for panel in axes]
    assert titles == ["patients of cleveland", "patients of hungary", "patients of switzerland"]
    for panel, means in zip(
        axes, ([0.5, 0.25, 0.25], [0.2, 0.6, 0.2], [0.3, 0.3, 0.4]), strict=True
    ):
        assert labels(panel.get_xticklabels()) == EXPERTS
        crosses = next(line for line in panel.lines if line.get_marker() == "x")
        assert list(crosses.get_ydata()) == means
        assert shown(panel) == []


def test_a_box_spans_quartiles_and_its_whiskers_reach_5_and_95_percent() -> None:
    panel = draw_routing(WHOLE)["routing.png"].axes[0]
    heights = sorted({round(float(y), 6) for line in panel.lines[:6] for y in line.get_ydata()})
    assert heights == [0.4, 0.45, 0.5, 0.55, 0.6]  # of cleveland's expert


def test_a_violin_is_as_wide_as_patients_are_many_between_two_quantiles() -> None:
    weight = {"mean": 0.3, "q05": 0.0, "q25": 0.1, "q50": 0.3, "q75": 0.4, "q95": 0.9}
    drawn = violin_statistics(weight)
    assert drawn["coords"] == pytest.approx([0.0, 0.1, 0.1, 0.3, 0.3, 0.4, 0.4, 0.9])
    # Shares of 0.2, 0.25, 0.25 and 0.2 over distances of 0.1, 0.2, 0.1 and 0.5
    assert drawn["vals"] == pytest.approx([2.0, 2.0, 1.25, 1.25, 2.5, 2.5, 0.4, 0.4])
    assert (drawn["median"], drawn["min"], drawn["max"]) == (0.3, 0.0, 0.9)


def test_patients_of_one_weight_make_a_violin_of_bounded_width() -> None:
    same = dict.fromkeys(("mean", "q05", "q25", "q50", "q75", "q95"), 1.0)
    drawn = violin_statistics(same)
    assert max(drawn["vals"]) == pytest.approx(25.0)
    assert draw_routing(document(va=dict.fromkeys(EXPERTS, same)))["routing.png"]


def test_a_hospital_of_too_few_patients_has_crosses_and_says_why_there_is_no_box() -> None:
    few = document(cleveland=metrics_of(0.5, 0.25, 0.25), va=metrics_of(0.1, 0.1, 0.8, boxes=False))
    boxed, bare = draw_routing(few)["routing.png"].axes
    assert shown(boxed) == []
    assert shown(bare) == ["too few samples for a violin"]
    assert len(bare.lines) == 1 < len(boxed.lines)
    assert list(bare.lines[0].get_ydata()) == [0.1, 0.1, 0.8]


@pytest.mark.parametrize(
    ("sites", "panels", "drawn"), [(1, 1, 1), (4, 4, 4), (5, 8, 5), (9, 12, 9)]
)
def test_more_than_four_hospitals_go_into_further_rows_and_no_empty_panel_is_drawn(
    sites: int, panels: int, drawn: int
) -> None:
    many = document(**{f"s{index}": metrics_of(0.2, 0.3, 0.5) for index in range(sites)})
    axes = draw_routing(many)["routing.png"].axes
    assert len(axes) == panels
    assert [panel.axison for panel in axes] == [True] * drawn + [False] * (panels - drawn)


def test_the_matrix_holds_mean_weights_of_hospitals_by_experts() -> None:
    (axes,) = draw_routing(WHOLE)["routing-matrix.png"].axes
    assert cells(axes) == [[0.5, 0.25, 0.25], [0.2, 0.6, 0.2], [0.3, 0.3, 0.4]]
    assert labels(axes.get_yticklabels()) == ["cleveland", "hungary", "switzerland"]
    assert labels(axes.get_xticklabels()) == EXPERTS
    assert axes.images[0].get_clim() == (0.0, 1.0)
    assert shown(axes)[:3] == ["0.50", "0.25", "0.25"]


def test_distances_are_drawn_as_features_are_and_as_the_router_embeds_them() -> None:
    plain, embedded = draw_routing(WHOLE)["prototype-distances.png"].axes
    assert cells(plain)[0] == [0.0, 1.5, 2.5]
    assert cells(embedded)[0] == [0.0, 3.0, 5.0]
    assert embedded.images[0].get_clim() == (0.0, 7.0)


def test_one_expert_alone_has_no_distance_and_is_drawn_all_the_same() -> None:
    alone = {
        "experts": ["va"],
        "sites": {"va": {"va": {"mean": 1.0}}},
        "prototype distances": {"input": [[0.0]], "embedded": [[0.0]]},
    }
    found = draw_routing(alone)
    assert cells(found["routing-matrix.png"].axes[0]) == [[1.0]]
    apart = found["prototype-distances.png"].axes[0]
    assert shown(apart) == ["0.00"]
    assert apart.images[0].get_clim() == (0.0, 1.0)


def test_without_any_hospitals_metrics_only_distances_are_drawn() -> None:
    assert set(draw_routing(document())) == {"prototype-distances.png"}
    assert set(draw_routing(document(va={}))) == {"prototype-distances.png"}
    too_few: dict[str, dict[str, float]] = {expert: {} for expert in EXPERTS}
    assert set(draw_routing(document(va=too_few))) == {"prototype-distances.png"}


def six_cells(start: int) -> list[float]:
    """Return the six cells of a map of two rows and three columns."""
    return [start + offset / 10 for offset in range(6)]


def grid(start: int) -> list[list[float]]:
    flat = six_cells(start)
    return [flat[:3], flat[3:]]


# bcn has two maps of class 0 and one of class 1; msk4 has none of class 0
DOCUMENT: dict[str, Any] = {
    "grid": [2, 3],
    "classes": ["other", "nevus"],
    "sites": {
        "bcn": {"0": [six_cells(1), six_cells(2)], "1": [six_cells(3)]},
        "msk4": {"1": [six_cells(4), six_cells(5), six_cells(6)]},
    },
}


def panels(document: dict[str, Any]) -> list[Any]:
    found = draw_buffer(document)
    assert list(found) == ["buffer.png"]
    return list(found["buffer.png"].axes)


def grid_shown(panel: Any) -> list[list[float]] | None:
    if not panel.images:
        return None
    (image,) = panel.images
    found: list[list[float]] = image.get_array().tolist()
    return found


def test_there_is_a_row_per_site_and_a_block_of_columns_per_class() -> None:
    assert len(panels(DOCUMENT)) == 2 * (2 + 3)


def test_each_map_stands_in_its_sites_row_and_its_classes_block() -> None:
    found = [grid_shown(panel) for panel in panels(DOCUMENT)]
    assert found[:5] == [grid(1), grid(2), grid(3), None, None]
    assert found[5:] == [None, None, grid(4), grid(5), grid(6)], "msk4 has no map of class 0"


def test_sites_are_named_beside_their_rows_and_classes_above_their_blocks() -> None:
    found = panels(DOCUMENT)
    assert [panel.get_ylabel() for panel in found] == ["bcn", *[""] * 4, "msk4", *[""] * 4]
    titles = [panel.get_title(loc="left") for panel in found]
    assert titles == ["other", "", "nevus", "", "", *[""] * 5]


def test_a_class_without_a_name_is_numbered() -> None:
    found = panels(DOCUMENT | {"classes": []})
    assert [panel.get_title(loc="left") for panel in found[:3]] == ["class 0", "", "class 1"]


def test_classes_are_in_the_order_of_their_numbers_and_only_those_with_maps() -> None:
    sites = {"a": {"10": [six_cells(1)], "2": [six_cells(2)]}, "b": {"9": [six_cells(3)]}}
    found = panels({"grid": [2, 3], "classes": [], "sites": sites})
    titles = [panel.get_title(loc="left") for panel in found[:3]]
    assert titles == ["class 2", "class 9", "class 10"]
    assert [grid_shown(panel) for panel in found] == [grid(2), None, grid(1), None, grid(3), None]


@pytest.mark.parametrize("maps", [1, 5])
def test_a_single_site_of_one_class_is_drawn_and_can_be_saved(maps: int) -> None:
    sites = {"bcn": {"1": [six_cells(index) for index in range(maps)]}}
    found = draw_buffer(DOCUMENT | {"sites": sites})["buffer.png"]
    assert [grid_shown(panel) for panel in found.axes] == [grid(index) for index in range(maps)]
    assert found.axes[0].get_title(loc="left") == "nevus"
    picture = io.BytesIO()
    found.savefig(picture, format="png")
    assert picture.getvalue().startswith(b"\x89PNG")
