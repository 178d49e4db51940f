"""Lines one by one, and of too many their median, two bands and the five that end worst."""

import numpy as np
from matplotlib.figure import Figure

from fedsilo.core.drawing.palette import line_styles
from fedsilo.pictures.learning_curves import draw_lines
from fedsilo.server_app.records.summary import MANY


def _lines(count: int) -> dict[str, dict[int, float]]:
    """Return lines of two rounds, of which the n-th ends at n."""
    return {f"s{place:03}": {1: 0.0, 2: float(place)} for place in range(count)}


def test_as_many_as_can_be_told_apart_are_drawn_as_they_are() -> None:
    axes, lines = Figure().subplots(), _lines(MANY)
    draw_lines(axes, lines, line_styles(list(lines)))
    assert [line.get_label() for line in axes.lines] == list(lines)
    assert axes.get_legend() is None


def test_of_more_the_spread_is_drawn_and_the_worst_by_name() -> None:
    for high_is_worse, shown in ((False, range(5)), (True, range(100, 95, -1))):
        axes, lines = Figure().subplots(), _lines(101)
        draw_lines(axes, lines, {}, high_is_worse=high_is_worse)
        labels = [line.get_label() for line in axes.lines]
        assert labels == ["median", *(f"s{place:03}" for place in shown)]
        assert list(np.asarray(axes.lines[0].get_ydata())) == [0, 50]
        legend = axes.get_legend()
        assert legend is not None
        texts = [text.get_text() for text in legend.get_texts()]
        assert texts[:2] == ["5% to 95% of 101", "25% to 75% of 101"]
        edges = [band.get_paths()[0].get_extents().ymax for band in axes.collections]
        assert edges == [95, 75]
