"""Pictures of a topology: the graph with its weights next to the cycle times, and EMD weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedsilo.core.drawing.palette import BLUE, ORANGE, LineStyle, line_styles
from fedsilo.core.drawing.panels import line_legend
from fedsilo.pictures.panel_grids import new_figure, over_rounds, panel_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]
Series = Mapping[Any, float]

_LABELLED = 16  # lines up to which each has its weight written on it
_ONE_PANEL = 10  # lines that can be distinguished in one panel
_STRETCH = 1.16  # names stand on a circle larger than the sites' circle by this factor


def draw_topology(document: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the picture of a topology.json: file name -> figure."""
    figure = new_figure(11, 6)
    graph, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_graph(graph, document)
    _draw_times(bars, document)
    return {"topology.png": figure}


def draw_edge_weights(document: Mapping[str, Series]) -> dict[str, Figure]:
    """Return ``closeness.png``, a line per edge of its weight over rounds.

    The document is ``{"i<-j": {round: weight}}``. Many edges are drawn in a panel per receiving
    silo i, where a colour is a sending silo j.
    """
    panels = _panels(document)
    columns, one = min(4, len(panels)), len(panels) == 1
    size, margin = ((9.0, 5.0), (0.0, 0.0)) if one else ((2.8, 2.4), (2.0, 1.0))
    figure, axes = panel_grid(len(panels), columns, size, margin, sharex=True, sharey=True)
    labels = sorted({label for lines in panels.values() for label in lines})
    styles = line_styles(labels)
    for place, (title, lines) in zip(axes, panels.items(), strict=True):
        _draw_lines(place, title, lines, styles)
    for place in axes[-columns:]:
        place.tick_params(labelbottom=True)  # shared axes hide the labels if no panel is below
    figure.suptitle("Closeness of neighbours' feature maps (EMD weights of distillation)")
    figure.supxlabel("round", fontsize="medium")
    figure.supylabel("EMD weight, mean of the round", fontsize="medium")
    line_legend(figure, styles, "edge" if one else "teacher from")
    return {"closeness.png": figure}


def _panels(document: Mapping[str, Series]) -> dict[str, dict[str, Series]]:
    """Return panel title -> label -> line."""
    if len(document) <= _ONE_PANEL:
        return {"": dict(document)}
    panels: dict[str, dict[str, Series]] = {}
    for edge in sorted(document):
        i, j = edge.split("<-")
        panels.setdefault(f"student {i}", {})[j] = document[edge]
    return panels


def _draw_lines(
    axes: Axes, title: str, lines: Mapping[str, Series], styles: Mapping[str, LineStyle]
) -> None:
    for label, series in lines.items():
        points = sorted((int(round_), value) for round_, value in series.items())
        rounds, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(
            rounds, values, linewidth=1.2, markersize=4, label=label, **styles[label].options()
        )
    axes.set_title(title, fontsize="small")
    over_rounds(axes)


def _draw_graph(axes: Axes, document: Mapping[str, Any]) -> None:
    """Draw silos on a circle; a line without an arrowhead goes both ways."""
    points = _places(document)
    lines = _lines(document["edges"])
    weights = [line["weight"] for line in lines]
    alike = max(weights) - min(weights) < 1e-9
    for line in lines:
        share = 1.0 if alike else line["weight"] / max(weights)
        _draw_line(axes, points[line["from"]], points[line["to"]], line["directed"], share)
        if not alike and len(lines) <= _LABELLED:
            _write_weight(axes, points[line["from"]], points[line["to"]], line["weight"])
    _draw_sites(axes, points)
    axes.set_title(_title(document, weights), fontsize="medium")
    axes.set_aspect("equal")
    axes.set_xlim(-1.5, 1.5)
    axes.set_ylim(-1.3, 1.3)
    axes.set_axis_off()


def _places(document: Mapping[str, Any]) -> dict[str, Point]:
    """Return the place of each silo: clockwise from above, a ring in its order.

    A star's hub, the silo with the most edges, is in the middle.
    """
    sites, edges = list(document["sites"]), document["edges"]
    if document["kind"] == "ring":
        following = {edge["from"]: edge["to"] for edge in edges}
        for place in range(1, len(sites)):
            sites[place] = following[sites[place - 1]]
    places: dict[str, Point] = {}
    if document["kind"] == "star" and len(sites) > 2:
        ends = [edge["from"] for edge in edges]
        hub = max(sites, key=ends.count)
        sites.remove(hub)
        places[hub] = (0.0, 0.0)
    for place, site in enumerate(sites):
        angle = math.pi / 2 - 2 * math.pi * place / len(sites)
        places[site] = (math.cos(angle), math.sin(angle))
    return places


def _lines(edges: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines to draw: one for two arcs there and back of one weight."""
    weights = {(edge["from"], edge["to"]): edge["weight"] for edge in edges}
    lines = []
    for (start, end), weight in weights.items():
        paired = abs(weights.get((end, start), math.inf) - weight) < 1e-9
        if not paired or start < end:
            lines.append({"from": start, "to": end, "weight": weight, "directed": not paired})
    return lines


def _draw_line(axes: Axes, start: Point, end: Point, directed: bool, share: float) -> None:
    """Draw a line as thick and as dark as its ``share`` of the largest weight."""
    from matplotlib.patches import FancyArrowPatch

    line = FancyArrowPatch(
        start,
        end,
        arrowstyle="-|>" if directed else "-",
        mutation_scale=16,
        shrinkA=9,
        shrinkB=9,
        linewidth=0.5 + 1.7 * share,
        color=BLUE,
        alpha=0.2 + 0.7 * share,
        zorder=1,
    )
    axes.add_patch(line)


def _write_weight(axes: Axes, start: Point, end: Point, weight: float) -> None:
    """Write a weight on its line, off the middle, where diagonals cross."""
    x, y = (first + 0.4 * (second - first) for first, second in zip(start, end, strict=True))
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    axes.text(x, y, f"{weight:.2f}", ha="center", va="center", fontsize="x-small", bbox=box)


def _draw_sites(axes: Axes, points: Mapping[str, Point]) -> None:
    """Draw a dot per silo, with its name outside the circle, or below the hub's dot."""
    for site, (x, y) in points.items():
        axes.plot([x], [y], "o", markersize=11, color=ORANGE, zorder=2)
        middle = math.hypot(x, y) < 0.5
        side = "center" if abs(x) < 0.2 else ("left" if x > 0 else "right")
        axes.text(
            _STRETCH * x,
            y - 0.14 if middle else _STRETCH * y,
            site,
            ha=side,
            va="center",
            fontsize="small",
            zorder=3,
            bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"},
        )


def _title(document: Mapping[str, Any], weights: Sequence[float]) -> str:
    """Build the title, with the weights if they are not written on the lines."""
    low, high = min(weights), max(weights)
    kind = "expected weight" if "matchings" in document else "weight"
    start = f"{document['kind']}, {len(weights)} link{'s' if len(weights) > 1 else ''}"
    if high - low < 1e-9:
        return f"{start}: {kind} {high:.3g}{' each' if len(weights) > 1 else ''}"
    if len(weights) <= _LABELLED:
        return f"{start}: {kind}s on the lines"
    return f"{start}: {kind}s {low:.2g} (thin) to {high:.2g} (thick)"


def _draw_times(axes: Axes, document: Mapping[str, Any]) -> None:
    """Draw a bar per topology over the same links, the run's own in orange."""
    times = document["cycle-times"]
    if not times:
        missing = "cycle times: not measured,\nthe run was resumed at its end"
        axes.text(0.5, 0.5, missing, ha="center")
        axes.set_axis_off()
        return
    colours = [ORANGE if kind == document["kind"] else BLUE for kind in times]
    bars = axes.barh(list(times), list(times.values()), color=colours)
    axes.bar_label(bars, [f"{seconds:.3g} s" for seconds in times.values()], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    exchange = "out and back" if document["visit-seconds"] else "one way"
    axes.set_xlabel("seconds of a round: computing, latency and transfer")
    axes.set_title(
        f"cycle time, {document['model-bytes'] / 1e6:.3g} MB a model, {exchange}",
        fontsize="medium",
    )
    axes.spines[["top", "right"]].set_visible(False)
