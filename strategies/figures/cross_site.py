"""The picture of ``cross``: how well a model of each hospital does at each hospital."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DARK = 0.6  # of the scale, from where on black letters cannot be read


def draw_cross(document: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the picture of a cross.json, a heat map a metric: file name -> figure."""
    from matplotlib.figure import Figure

    size = max(len(found["trained"]) for found in document.values())
    figure = Figure(
        figsize=((1.8 + 0.75 * size) * len(document), 2.2 + 0.6 * size), layout="constrained"
    )
    panels = figure.subplots(1, len(document), squeeze=False)[0]
    for axes, (metric, found) in zip(panels, document.items(), strict=True):
        _draw_matrix(axes, metric, found)
    figure.suptitle("Trained at one hospital, tested at another", fontsize="medium")
    return {"cross.png": figure}


def _draw_matrix(axes: Axes, metric: str, found: Mapping[str, Any]) -> None:
    """Draw a metric's matrix on a scale of 0 to 1; where there is no figure the cell is empty."""
    matrix: Sequence[Sequence[float | None]] = found["values"]
    shades = np.array([[np.nan if v is None else v for v in row] for row in matrix])
    axes.imshow(shades, cmap="Blues", vmin=0.0, vmax=1.0)
    for y, row in enumerate(matrix):
        for x, value in enumerate(row):
            axes.text(
                x,
                y,
                "-" if value is None else f"{value:.2f}",
                ha="center",
                va="center",
                fontsize="small",
                color="white" if value is not None and value > _DARK else "black",
            )
    axes.set_xticks(range(len(found["tested"])), found["tested"], rotation=40, ha="right")
    axes.set_yticks(range(len(found["trained"])), found["trained"])
    axes.set_xlabel("tested at")
    axes.set_ylabel("trained at")
    axes.set_title(f"test {metric}", fontsize="small")
