"""Grids of panels: how many a row, and none to spare that is seen."""

import pytest

from fedsilo.server_app.studies.figures.panels import panel_grid


@pytest.mark.parametrize(
    ("count", "size"), [(1, (3.0, 2.5)), (3, (7.0, 2.5)), (4, (7.0, 4.5)), (6, (7.0, 4.5))]
)
def test_panel_grid_fills_rows_of_three(count: int, size: tuple[float, float]) -> None:
    figure, panels = panel_grid(count, 3, (2.0, 2.0), (1.0, 0.5))
    assert len(panels) == count
    assert tuple(figure.get_size_inches()) == size
    assert sum(axes.axison for axes in figure.axes) == count
