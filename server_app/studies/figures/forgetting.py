"""A picture of what the aggregation made the sites forget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedsilo.models.figures.palette import line_styles
from fedsilo.models.figures.panels import line_legend

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
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    styles = line_styles(sites)
    for site, style in styles.items():
        shares = {int(epoch) + 1: document["epochs"][epoch].get(site) for epoch in epochs}
        known = {epoch: 100 * share for epoch, share in shares.items() if share is not None}
        axes.plot(list(known), list(known.values()), markersize=4, label=site, **style.options())
    axes.set_xlabel("epoch")
    axes.set_ylabel("forgotten training samples, %")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    title = f"{document['variant']}: right by the local model, wrong by the average of all"
    figure.suptitle(title, fontsize="medium")
    line_legend(figure, styles)
    return {"forgotten.png": figure}
