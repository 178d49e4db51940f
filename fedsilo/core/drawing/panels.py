"""Shared parts of panels: heat maps, frameless images, one legend for all panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedsilo.core.drawing.palette import AMOUNTS, SIGNED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedsilo.core.drawing.palette import LineStyle

_DARK = 0.5  # share of white's luma below which black letters cannot be read
_LUMA = (0.299, 0.587, 0.114)  # weights for red, green and blue (ITU-R BT.601)


def literal(text: str) -> str:
    """Escape a string so that matplotlib shows it as it is, and not as a formula.

    Each '$' gets a backslash. A backslash in the string becomes '/'.
    """
    return text.replace("\\", "/").replace("$", r"\$")


def without_frame(axes: Axes) -> None:
    """Remove ticks and frame from a panel that shows an image. Titles and labels stay."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_frame_on(False)


def line_legend(
    figure: Figure, styles: Mapping[str, LineStyle], title: str = "", columns: int = 0
) -> None:
    """Add one legend for all panels of a figure, with an entry for each style of line.

    The legend is outside the panels. An entry shows a short line with its marker.

    Args:
        figure: the figure.
        styles: label of an entry -> style of its line. An empty mapping gives no legend.
        title: the title of the legend; an empty string gives none.
        columns: if above 0, the legend is below the panels and has at most this many columns. If 0,
            it is to the right of the panels, in one column.
    """
    from matplotlib.lines import Line2D

    if not styles:
        return
    handles = []
    for name, style in styles.items():
        handles.append(Line2D([], [], markersize=4, label=name, **style.options()))
    place: Literal["outside right upper", "outside lower center"] = "outside right upper"
    if columns:
        place = "outside lower center"
    figure.legend(
        handles=handles,
        title=title or None,
        loc=place,
        ncols=min(columns or 1, len(handles)),
        fontsize="small",
    )


def annotated_heat_map(
    axes: Axes,
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    *,
    top: float | None = None,
    signed: bool = False,
) -> None:
    """Draw a table of numbers as a heat map, with two decimals in each cell.

    Args:
        axes: the panel to draw on. Its image, ticks and title are set here.
        values: a list of numbers for each row; None is drawn as "-".
        rows: labels of the rows, from the top.
        columns: labels of the columns, from the left.
        title: the panel's title.
        top: the upper end of the colour scale; None or 0 stands for the largest absolute value.
            Numbers beyond an end of the scale get the colour of that end.
        signed: whether the scale runs from -top to top, with white at 0. Otherwise it runs from 0
            to top.
    """
    # None becomes NaN
    table = np.array(values, dtype=float)
    # A table of zeros or empty cells has no scale. Any number but 0 will do, because the ends of
    # the scale must differ
    limit = top or float(np.nan_to_num(np.abs(table)).max(initial=0.0)) or 1.0
    lowest, colours = 0.0, AMOUNTS
    if signed:
        lowest, colours = -limit, SIGNED
    drawn = axes.imshow(table, cmap=colours, vmin=lowest, vmax=limit, aspect="auto")
    for (y, x), value in np.ndenumerate(table):
        text, colour = f"{value:.2f}", "black"
        if np.isnan(value):
            text = "-"
        elif float(np.dot(drawn.to_rgba(value)[:3], _LUMA)) < _DARK:
            colour = "white"
        axes.text(x, y, text, ha="center", va="center", fontsize="small", color=colour)
    axes.set_xticks(range(len(columns)), columns, fontsize="small", rotation=40, ha="right")
    axes.set_yticks(range(len(rows)), rows, fontsize="small")
    axes.set_title(title, fontsize="small")
