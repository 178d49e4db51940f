"""A picture of what the aggregation made the sites forget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_forgotten(document: Mapping[str, Any]) -> dict[str, Figure]:
    """Return ``forgotten.png``: a line per site, the share of its samples over epochs.

    Args:
        document: ``variant``, and under ``epochs`` epoch (from 0, as text) -> site -> share.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    epochs = sorted(document["epochs"], key=int)
    sites = sorted({site for epoch in epochs for site in document["epochs"][epoch]})
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for site in sites:
        told = [(int(e) + 1, document["epochs"][e].get(site)) for e in epochs]
        known = [(epoch, 100 * share) for epoch, share in told if share is not None]
        axes.plot(*zip(*known, strict=True), marker=".", label=site)
    axes.set_xlabel("epoch")
    axes.set_ylabel("forgotten training samples, %")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(f"{document['variant']}: right by the local model, wrong by the average of all")
    axes.legend(frameon=False)
    return {"forgotten.png": figure}
