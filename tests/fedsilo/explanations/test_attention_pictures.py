"""The sheet of ``fedsilo attention``, looked at panel by panel."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from fedsilo.core.drawing.palette import WRONG
from fedsilo.explanations.attention import draw_sheet, rollout_map
from fedsilo.explanations.image_explanation import ImageExplanation, draw_map

NAMES = ["other", "nevus"]


def explained(grey: int, nevus: float, vacuity: float | None = 0.25) -> ImageExplanation:
    """Return an image of one grey, of which the network believes to ``nevus`` that it is one."""
    image = torch.full((1, 8, 8), grey, dtype=torch.uint8)
    rollout = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    beliefs = [] if vacuity is None else [0.0, 0.75]
    answers = [1 - nevus, nevus], beliefs, vacuity
    return ImageExplanation("nevus", image, rollout_map(rollout), NAMES, *answers)


def panels(sheet: list[list[ImageExplanation]], columns: int) -> tuple[list[list[Any]], Figure]:
    """Return the panels in rows, and the figure."""
    figure = draw_sheet(sheet, NAMES, "the title", columns)
    axes = figure.axes
    return [axes[start : start + columns] for start in range(0, len(axes), columns)], figure


def shown(image: Any) -> Any:
    return np.asarray(image.get_array())


def test_a_sheet_has_two_rows_per_class_an_image_and_its_map_below_it() -> None:
    sheet = [[explained(51, 0.2), explained(102, 0.1)], [explained(153, 0.9), explained(204, 0.8)]]
    rows, figure = panels(sheet, 2)
    assert len(rows) == 4
    assert figure.get_suptitle() == "the title"
    for label, explanations in enumerate(sheet):
        for column, explanation in enumerate(explanations):
            upper, lower = rows[2 * label][column], rows[2 * label + 1][column]
            grey = float(explanation.image[0, 0, 0]) / 255
            assert shown(upper.images[0]) == pytest.approx(grey)
            assert shown(lower.images[0]) == pytest.approx(grey)
            expected = Figure().subplots()
            draw_map(expected, explanation.image, explanation.saliency)
            assert np.allclose(shown(lower.images[1]), shown(expected.images[1]))
            assert upper.get_title() == f"{NAMES[label]}: predicted {NAMES[label]}\nvacuity 0.25"


def test_an_answer_that_is_wrong_stands_in_another_colour() -> None:
    sheet = [[explained(51, 0.2), explained(102, 0.7)], [explained(153, 0.4)]]
    rows, _ = panels(sheet, 2)
    titles = [panel.title for row in rows for panel in row if panel.get_title()]
    assert [title.get_text().splitlines()[0] for title in titles] == [
        "other: predicted other",
        "other: predicted nevus",
        "nevus: predicted other",
    ]
    assert [title.get_color() == WRONG for title in titles] == [False, True, True]


def test_a_network_without_evidence_is_named_with_its_doubt() -> None:
    rows, _ = panels([[explained(51, 0.25, vacuity=None)], []], 1)
    assert rows[0][0].get_title() == "other: predicted other\ndoubt 0.25"


def test_fewer_images_than_asked_for_leave_panels_empty() -> None:
    rows, _ = panels([[explained(51, 0.2)] * 2, [explained(51, 0.8)]], 5)
    assert [len(row) for row in rows] == [5, 5, 5, 5]
    filled = [[bool(panel.images) for panel in row] for row in rows]
    assert filled == [[True, True, False, False, False]] * 2 + [[True] + [False] * 4] * 2
    assert not any(panel.axison for row in rows for panel in row)


def test_a_class_without_images_is_told_of_and_the_other_is_drawn() -> None:
    rows, figure = panels([[explained(51, 0.2)], []], 1)
    assert [[bool(panel.images) for panel in row] for row in rows] == [[True]] * 2 + [[False]] * 2
    assert rows[2][0].get_title(loc="left") == "nevus: no image"
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    assert picture.getvalue().startswith(b"\x89PNG")
