"""The picture of ``fedsilo embeddings``: a panel per run, a colour per site, a marker per class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsilo.models.figures.palette import GREY, colours
from fedsilo.server_app.studies.figures.embeddings import Panel
from fedsilo.server_app.studies.figures.panels import panel_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "oxs^vDP*+<"  # of class 0, 1, ...


def draw_panels(panels: Sequence[Panel], title: str) -> Figure:
    """Return the picture: axes per run, a colour per site, a marker per class."""
    from matplotlib.lines import Line2D

    columns = 2 if len(panels) == 4 else min(3, len(panels))
    figure, axes_of = panel_grid(len(panels), columns, (4.4, 5.0), (0.4, 0.9))
    sites = list(dict.fromkeys(site for panel in panels for site in panel.cloud.sites))
    classes = max((panel.cloud.classes for panel in panels), key=len)
    shades = colours(sites)
    for axes, panel in zip(axes_of, panels, strict=True):
        _draw_panel(axes, panel, [shades[site] for site in panel.cloud.sites])
    handles = [Line2D([], [], color=shades[site], marker="o", ls="", label=site) for site in sites]
    handles += [
        Line2D([], [], color=GREY, marker=_marker(label), ls="", label=_class(name))
        for label, name in enumerate(classes)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4 * columns, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw_panel(axes: Axes, panel: Panel, shades: Sequence[Any]) -> None:
    cloud = panel.cloud
    # In random order, or the last site would hide the others
    order = np.random.default_rng(0).permutation(len(panel.points))
    for label in range(len(cloud.classes)):
        chosen = order[cloud.label[order] == label]
        axes.scatter(
            panel.points[chosen, 0],
            panel.points[chosen, 1],
            c=[shades[site] for site in cloud.site[chosen]],
            marker=_marker(label),
            s=22,
            alpha=0.75,
            linewidths=1.0 if _marker(label) in "x+" else 0.0,
        )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(panel.title, fontsize="small")
    axes.set_xlabel("\n".join(panel.lines()), fontsize="small")


def _marker(label: int) -> str:
    return _MARKERS[label % len(_MARKERS)]


def _class(name: str) -> str:
    return f"class {name}" if name.isdecimal() else name
