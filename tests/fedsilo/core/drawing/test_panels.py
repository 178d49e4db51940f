"""What panels share, looked at by what their axes have."""

from typing import Any

import pytest
from matplotlib.figure import Figure

from fedsilo.core.drawing.palette import AMOUNTS, SIGNED, line_styles
from fedsilo.core.drawing.panels import annotated_heat_map, line_legend, without_frame


def test_axes_without_a_frame_keep_their_title() -> None:
    axes = Figure().subplots()
    axes.set_title("kept")
    without_frame(axes)
    assert (list(axes.get_xticks()), list(axes.get_yticks())) == ([], [])
    assert not axes.get_frame_on()
    assert axes.get_title() == "kept"


def test_the_legend_shows_lines_as_they_are_drawn_and_none_of_none() -> None:
    styles = line_styles(["a", "b"])
    figure = Figure(layout="constrained")
    line_legend(figure, {})
    assert not figure.legends
    line_legend(figure, styles, "site")
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "site"
    assert [text.get_text() for text in legend.texts] == ["a", "b"]
    shown = [(line.get_color(), line.get_marker()) for line in legend.get_lines()]
    assert shown == [(style.color, style.marker) for style in styles.values()]


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
