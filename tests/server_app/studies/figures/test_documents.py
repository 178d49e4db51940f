"""The contact sheet of an attention buffer, looked at panel by panel."""

from __future__ import annotations

import io
from typing import Any

import pytest

from fedsilo.server_app.studies.figures.documents import draw_buffer


def cells(start: int) -> list[float]:
    """Return the six cells of a map of two rows and three columns."""
    return [start + offset / 10 for offset in range(6)]


def grid(start: int) -> list[list[float]]:
    flat = cells(start)
    return [flat[:3], flat[3:]]


# bcn has two maps of class 0 and one of class 1; msk4 has none of class 0
DOCUMENT: dict[str, Any] = {
    "grid": [2, 3],
    "classes": ["other", "nevus"],
    "sites": {
        "bcn": {"0": [cells(1), cells(2)], "1": [cells(3)]},
        "msk4": {"1": [cells(4), cells(5), cells(6)]},
    },
}


def panels(document: dict[str, Any]) -> list[Any]:
    found = draw_buffer(document)
    assert list(found) == ["buffer.png"]
    return list(found["buffer.png"].axes)


def shown(panel: Any) -> list[list[float]] | None:
    if not panel.images:
        return None
    (image,) = panel.images
    found: list[list[float]] = image.get_array().tolist()
    return found


def test_there_is_a_row_per_site_and_a_block_of_columns_per_class() -> None:
    assert len(panels(DOCUMENT)) == 2 * (2 + 3)


def test_each_map_stands_in_its_sites_row_and_its_classes_block() -> None:
    found = [shown(panel) for panel in panels(DOCUMENT)]
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
    sites = {"a": {"10": [cells(1)], "2": [cells(2)]}, "b": {"9": [cells(3)]}}
    found = panels({"grid": [2, 3], "classes": [], "sites": sites})
    titles = [panel.get_title(loc="left") for panel in found[:3]]
    assert titles == ["class 2", "class 9", "class 10"]
    assert [shown(panel) for panel in found] == [grid(2), None, grid(1), None, grid(3), None]


@pytest.mark.parametrize("maps", [1, 5])
def test_a_single_site_of_one_class_is_drawn_and_can_be_saved(maps: int) -> None:
    sites = {"bcn": {"1": [cells(index) for index in range(maps)]}}
    found = draw_buffer(DOCUMENT | {"sites": sites})["buffer.png"]
    assert [shown(panel) for panel in found.axes] == [grid(index) for index in range(maps)]
    assert found.axes[0].get_title(loc="left") == "nevus"
    picture = io.BytesIO()
    found.savefig(picture, format="png")
    assert picture.getvalue().startswith(b"\x89PNG")
