"""Kaplan-Meier curves of a run's metrics: whose are drawn, and what stands at their points."""

import pytest

from fedsilo.models.measures.survival_curves import CurvePoint
from fedsilo.pictures.survival import draw_survival, site_curves


def _rows(site: str, points: int, split: str = "test") -> list[dict[str, str]]:
    """Return the rows of a curve that loses a tenth of its patients each year."""
    rows = []
    for number in range(points):
        share = 1.0 - 0.1 * (number + 1)
        parts = {"time": number + 1.0, "share": share, "low": share - 0.05, "high": share + 0.05}
        parts["followed"] = 90.0 - 10 * number
        for part, value in parts.items():
            metric = f"survival.{number}.{part}"
            rows.append({"site": site, "split": split, "metric": metric, "value": str(value)})
    return rows


@pytest.mark.parametrize("points", [1, 3])
def test_the_curves_of_test_patients_are_read_by_site(points: int) -> None:
    rows = [*_rows("south", points), *_rows("north", 1), *_rows("east", 1, "val")]
    rows.append({"site": "west", "split": "test", "metric": "c-index", "value": "0.7"})
    curves = site_curves(rows)
    assert list(curves) == ["north", "south"]
    assert curves["north"] == [CurvePoint(1.0, 0.9, 0.9 - 0.05, 0.9 + 0.05, 90)]
    assert [point.followed for point in curves["south"]] == [90, 80, 70][:points]


def test_each_site_has_a_panel_that_begins_at_everybody_and_names_at_most_six_numbers() -> None:
    figure = draw_survival([*_rows("north", 2), *_rows("south", 9)])["survival.png"]
    north, south = [axes for axes in figure.axes if axes.lines]
    assert [axes.get_title() for axes in (north, south)] == ["north", "south"]
    (line,) = north.lines
    assert list(line.get_xdata()) == [0.0, 1.0, 2.0]
    assert list(line.get_ydata()) == pytest.approx([1.0, 0.9, 0.8])
    assert [text.get_text() for text in north.texts] == ["90", "80"]
    assert [text.get_text() for text in south.texts] == ["90", "70", "50", "30", "10"]
    assert north.get_ylim() == south.get_ylim() == (0.0, 1.02)


def test_a_run_without_curves_has_no_picture() -> None:
    assert draw_survival(_rows("north", 2, "val")) == {}
