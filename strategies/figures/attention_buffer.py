"""The attention buffer as a contact sheet: what the hospitals show one another (eq. 6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_buffer(document: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the picture of a buffer.json: a row per site, a block of M maps per class."""
    from matplotlib.figure import Figure

    sites = document["sites"]
    labels = sorted({label for found in sites.values() for label in found}, key=int)
    most = {label: max(len(found.get(label, ())) for found in sites.values()) for label in labels}
    columns = sum(most.values())
    figure = Figure(figsize=(1.4 + 0.9 * columns, 1.2 + 0.95 * len(sites)), layout="constrained")
    panels = figure.subplots(len(sites), columns, squeeze=False)
    for axes in panels.flatten():
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_frame_on(False)
    names = document["classes"]
    for row, (site, found) in enumerate(sites.items()):
        panels[row, 0].set_ylabel(site, rotation=0, ha="right", va="center", fontsize="small")
        first = 0
        for label in labels:
            for offset, cells in enumerate(found.get(label, ())):
                grid = np.reshape(cells, document["grid"])
                panels[row, first + offset].imshow(grid, cmap="magma")
            if row == 0:
                name = names[int(label)] if names else f"class {label}"
                panels[0, first].set_title(name, fontsize="small", loc="left")
            first += most[label]
    figure.suptitle(
        "Attention buffer: rollout maps that each hospital chose to send (each in its own colours)",
        fontsize="medium",
    )
    return {"buffer.png": figure}
