"""The attention buffer as a contact sheet: what the hospitals show one another (eq. 6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsilo.models.figures.palette import SALIENCY
from fedsilo.models.figures.panels import without_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_buffer(document: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the picture of a buffer.json: a row per site, a block of M maps per class."""
    from matplotlib.figure import Figure

    sites, first_columns, width = document["sites"], *_blocks(document["sites"])
    figure = Figure(figsize=(1.4 + 0.9 * width, 1.2 + 0.95 * len(sites)), layout="constrained")
    panels = figure.subplots(len(sites), width, squeeze=False)
    for axes in panels.flatten():
        without_frame(axes)
    for label, first in first_columns.items():
        panels[0, first].set_title(_class_name(document, label), fontsize="small", loc="left")
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


def _class_name(document: Mapping[str, Any], label: str) -> str:
    names = document["classes"]
    return str(names[int(label)]) if names else f"class {label}"
