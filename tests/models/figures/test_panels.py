"""What stands around panels."""

from matplotlib.figure import Figure

from fedsilo.models.figures.palette import line_styles
from fedsilo.models.figures.panels import line_legend, without_frame


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
