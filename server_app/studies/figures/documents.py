"""Pictures of the JSON documents that some methods write: cross, forgotten, buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsilo.models.figures.heat_map import annotated_heat_map
from fedsilo.models.figures.palette import SALIENCY, line_styles
from fedsilo.models.figures.panels import line_legend, without_frame
from fedsilo.server_app.studies.figures.panels import new_figure, over_rounds

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_cross(document: Mapping[str, Any]) -> dict[str, Figure]:
    """Return ``cross.png``: a heat map per metric, from 0 to 1, of each hospital's model at each.

    A cell without a value is empty.
    """
    size = max(len(matrix["trained"]) for matrix in document.values())
    figure = new_figure((1.8 + 0.75 * size) * len(document), 2.2 + 0.6 * size)
    panels = figure.subplots(1, len(document), squeeze=False)[0]
    for axes, (metric, matrix) in zip(panels, document.items(), strict=True):
        sites = matrix["trained"], matrix["tested"]
        annotated_heat_map(axes, matrix["values"], *sites, f"test {metric}", top=1.0)
        axes.set_xlabel("tested at")
        axes.set_ylabel("trained at")
    figure.suptitle("Trained at one hospital, tested at another", fontsize="medium")
    return {"cross.png": figure}


def draw_forgotten(document: Mapping[str, Any]) -> dict[str, Figure]:
    """Return ``forgotten.png``: a line per site, the share of its samples over epochs.

    Args:
        document: ``variant``, and under ``epochs`` epoch (from 0, as text) -> site -> share.
    """
    epochs = sorted(document["epochs"], key=int)
    sites = sorted({site for epoch in epochs for site in document["epochs"][epoch]})
    figure = new_figure(8, 4)
    axes = figure.add_subplot()
    styles = line_styles(sites)
    for site, style in styles.items():
        shares = {int(epoch) + 1: document["epochs"][epoch].get(site) for epoch in epochs}
        known = {epoch: 100 * share for epoch, share in shares.items() if share is not None}
        axes.plot(list(known), list(known.values()), markersize=4, label=site, **style.options())
    over_rounds(axes)
    axes.set_xlabel("epoch")
    axes.set_ylabel("forgotten training samples, %")
    axes.set_ylim(bottom=0)
    title = f"{document['variant']}: right by the local model, wrong by the average of all"
    figure.suptitle(title, fontsize="medium")
    line_legend(figure, styles)
    return {"forgotten.png": figure}


def draw_buffer(document: Mapping[str, Any]) -> dict[str, Figure]:
    """Return ``buffer.png``, a contact sheet: a row per site, a block of M maps per class."""
    sites, first_columns, width = document["sites"], *_blocks(document["sites"])
    figure = new_figure(1.4 + 0.9 * width, 1.2 + 0.95 * len(sites))
    panels = figure.subplots(len(sites), width, squeeze=False)
    names = document["classes"]
    for axes in panels.flatten():
        without_frame(axes)
    for label, first in first_columns.items():
        name = str(names[int(label)]) if names else f"class {label}"
        panels[0, first].set_title(name, fontsize="small", loc="left")
    for row, (site, maps) in enumerate(sites.items()):
        panels[row, 0].set_ylabel(site, rotation=0, ha="right", va="center", fontsize="small")
        for label, first in first_columns.items():
            for offset, cells in enumerate(maps.get(label, ())):
                grid = np.reshape(cells, document["grid"])
                panels[row, first + offset].imshow(grid, cmap=SALIENCY)
    figure.suptitle(
        "Attention buffer: rollout maps that each hospital\n"
        "chose to send (each in its own colours)",
        fontsize="medium",
    )
    return {"buffer.png": figure}


def _blocks(sites: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, int], int]:
    """Return class -> first column of its block, as wide as any site needs, and all columns."""
    first_columns: dict[str, int] = {}
    column = 0
    for label in sorted({label for maps in sites.values() for label in maps}, key=int):
        first_columns[label] = column
        column += max(len(maps.get(label, ())) for maps in sites.values())
    return first_columns, column
