"""The picture of ``cross``: how well a model of each hospital does at each hospital."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedsilo.models.figures.heat_map import annotated_heat_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_cross(document: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the picture of a cross.json, a heat map a metric: file name -> figure.

    A metric's scale is 0 to 1; where there is no value the cell is empty.
    """
    from matplotlib.figure import Figure

    size = max(len(matrix["trained"]) for matrix in document.values())
    figure = Figure(
        figsize=((1.8 + 0.75 * size) * len(document), 2.2 + 0.6 * size), layout="constrained"
    )
    panels = figure.subplots(1, len(document), squeeze=False)[0]
    for axes, (metric, matrix) in zip(panels, document.items(), strict=True):
        annotated_heat_map(
            axes, matrix["values"], matrix["trained"], matrix["tested"], f"test {metric}", top=1.0
        )
        axes.set_xlabel("tested at")
        axes.set_ylabel("trained at")
    figure.suptitle("Trained at one hospital, tested at another", fontsize="medium")
    return {"cross.png": figure}
