"""The annotated heat map, looked at by what stands in its axes."""

from typing import Any

import pytest
from matplotlib.figure import Figure

from fedsilo.models.figures.heat_map import annotated_heat_map
from fedsilo.models.figures.palette import AMOUNTS, SIGNED


def drawn(values: list[list[float | None]], **more: Any) -> Any:
    axes = Figure().subplots()
    rows, columns = [f"r{i}" for i in range(len(values))], [f"c{i}" for i in range(len(values[0]))]
    annotated_heat_map(axes, values, rows, columns, "title", **more)
    return axes


def texts(axes: Any) -> list[tuple[str, str]]:
    return [(text.get_text(), text.get_color()) for text in axes.texts]


def test_numbers_stand_in_their_cells_white_on_dark_ones() -> None:
    axes = drawn([[0.1, 1.0], [None, 0.54]])
    assert texts(axes) == [("0.10", "black"), ("1.00", "white"), ("-", "black"), ("0.54", "black")]
    assert [text.get_position() for text in axes.texts] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["c0", "c1"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["r0", "r1"]
    assert axes.get_title() == "title"
    assert axes.images[0].get_cmap().name == AMOUNTS


def test_a_signed_table_is_white_at_0_and_dark_at_both_ends() -> None:
    axes = drawn([[-2.0, 0.0, 1.9]], signed=True)
    assert axes.images[0].get_clim() == (-2, 2)
    assert axes.images[0].get_cmap().name == SIGNED
    assert [colour for _, colour in texts(axes)] == ["white", "black", "white"]


@pytest.mark.parametrize(
    ("values", "top", "limits"),
    [
        ([[0.5, 0.25]], None, (0, 0.5)),
        ([[0.5, 0.25]], 1.0, (0, 1)),
        ([[0.0, 0.0]], None, (0, 1)),
        ([[None, None]], None, (0, 1)),
    ],
)
def test_the_scale_runs_to_the_top_or_the_largest_value(
    values: list[list[float | None]], top: float | None, limits: tuple[float, float]
) -> None:
    assert drawn(values, top=top).images[0].get_clim() == limits
