"""Around panels: no frame around images, one legend next to all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedsilo.models.figures.palette import LineStyle


def without_frame(axes: Axes) -> None:
    """Take ticks and frame away, as around an image; titles and labels stay."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_frame_on(False)


def line_legend(
    figure: Figure, styles: Mapping[str, LineStyle], title: str = "", columns: int = 0
) -> None:
    """Put one legend of lines (name -> style) next to all panels, and none without lines.

    With ``columns`` it is below them, in as many columns.
    """
    from matplotlib.lines import Line2D

    if not styles:
        return
    handles = [
        Line2D([], [], markersize=4, label=name, **style.options())
        for name, style in styles.items()
    ]
    figure.legend(
        handles=handles,
        title=title or None,
        loc="outside lower center" if columns else "outside right upper",
        ncols=min(columns or 1, len(handles)),
        fontsize="small",
    )
