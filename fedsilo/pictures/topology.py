"""Draw a topology: its graph with weights next to its cycle times, and EMD weights over rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedsilo.core.drawing.palette import BLUE, ORANGE, LineStyle, line_styles
from fedsilo.core.drawing.panels import line_legend
from fedsilo.core.one_line import format_count
from fedsilo.pictures.panel_grids import new_figure, over_rounds, panel_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]
Series = Mapping[Any, float]

_LABELLED = 16  # the most lines that get their weight written on them
_ONE_PANEL = 10  # lines that can be distinguished in one panel
_STRETCH = 1.16  # names stand on a circle larger than the sites' circle by this factor


def draw_topology(document: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw ``topology.png``: which silos exchange models, and how long a round takes.

    The left panel has the run's topology as a graph, with the weights of its edges. The right panel
    has a bar for each kind of topology, such as a ring or a star. A bar shows how many seconds a
    round takes with this kind. If no times were measured, the right panel says so.

    Args:
        document: the content of topology.json.

    Returns:
        File name -> figure.
    """
    figure = new_figure(11, 6)
    graph, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_graph(graph, document)
    _draw_times(bars, document)
    return {"topology.png": figure}


def draw_edge_weights(document: Mapping[str, Series]) -> dict[str, Figure]:
    """Draw ``closeness.png``: how much a silo learns from each neighbour over rounds, in FedEFM.

    Silo i, the student, learns from its neighbour j, the teacher, by distillation. The edge 'i<-j'
    has the weight of this distillation, averaged over the round. The weight measures how close the
    feature maps of the two models are, by the earth mover's distance (EMD).

    Up to 10 edges are lines in one panel. With more edges, each student has a panel with a line for
    each of its teachers. A teacher has the same colour in all panels.

    Args:
        document: 'i<-j' -> round (a string, as in JSON) -> weight.

    Returns:
        File name -> figure.
    """
    panels = _group_edges(document)
    columns = min(4, len(panels))
    size, margin, heading = (2.8, 2.4), (2.0, 1.0), "teacher from"
    if len(panels) == 1:
        size, margin, heading = (9.0, 5.0), (0.0, 0.0), "edge"
    figure, axes = panel_grid(len(panels), columns, size, margin, sharex=True, sharey=True)
    labels: set[str] = set()
    for lines in panels.values():
        labels |= lines.keys()
    styles = line_styles(sorted(labels))
    for place, (title, lines) in zip(axes, panels.items(), strict=True):
        _draw_lines(place, title, lines, styles)
    for place in axes[-columns:]:
        place.tick_params(labelbottom=True)  # shared axes hide the labels if no panel is below
    figure.suptitle("Closeness of neighbours' feature maps (EMD weights of distillation)")
    figure.supxlabel("round", fontsize="medium")
    figure.supylabel("EMD weight, mean of the round", fontsize="medium")
    line_legend(figure, styles, heading)
    return {"closeness.png": figure}


def _group_edges(document: Mapping[str, Series]) -> dict[str, dict[str, Series]]:
    """Group the edges into panels.

    An edge 'i<-j' leads from a teacher silo j to a student silo i. Up to 10 edges share one panel
    with an empty title, and each line is labelled with its edge. With more edges, each student i
    has a panel 'student i', with a line labelled 'j' for each of its teachers j. Edges are then in
    alphabetical order.

    Returns:
        Title of a panel -> label of a line -> round -> weight.
    """
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
    """Draw lines over rounds in one panel, a line for each label.

    Args:
        axes: the panel.
        title: the title of the panel.
        lines: label -> round (a string, as in JSON) -> value.
        styles: label -> style of its line.
    """
    for label, series in lines.items():
        value_of = {int(round_): value for round_, value in series.items()}
        rounds = sorted(value_of)
        values = [value_of[round_] for round_ in rounds]
        style = styles[label].options()
        axes.plot(rounds, values, linewidth=1.2, markersize=4, label=label, **style)
    axes.set_title(title, fontsize="small")
    over_rounds(axes)


def _draw_graph(axes: Axes, document: Mapping[str, Any]) -> None:
    """Draw the graph of a topology: a dot for each silo, and a line for each edge.

    Two edges in opposite directions with equal weights become one line without an arrowhead. If the
    lines of the graph have different weights, a line with a larger weight is wider and darker. Up
    to 16 lines of different weights also have their weights written on them.
    """
    points = _place_silos(document)
    lines = _merge_edges(document["edges"])
    weights = [line["weight"] for line in lines]
    # Weights are computed, so equal ones may differ by rounding
    alike = max(weights) - min(weights) < 1e-9
    for line in lines:
        start, end, share = points[line["from"]], points[line["to"]], 1.0
        if not alike:
            share = line["weight"] / max(weights)
        _draw_line(axes, start, end, line["directed"], share)
        if not alike and len(lines) <= _LABELLED:
            _write_weight(axes, start, end, line["weight"])
    _draw_sites(axes, points)
    axes.set_title(_title(document, weights), fontsize="medium")
    axes.set_aspect("equal")
    axes.set_xlim(-1.5, 1.5)
    axes.set_ylim(-1.3, 1.3)
    axes.set_axis_off()


def _place_silos(document: Mapping[str, Any]) -> dict[str, Point]:
    """Compute each silo's position: on the unit circle, clockwise from the top.

    The silos are in the order of ``document["sites"]``. In a ring, they follow its edges from the
    first of these sites. In a star of more than two silos, the hub is in the centre. The hub is the
    silo with the most outgoing edges.
    """
    sites, edges = list(document["sites"]), document["edges"]
    if document["kind"] == "ring":
        # Neighbours stand next to each other, so that no line crosses the circle
        following = {edge["from"]: edge["to"] for edge in edges}
        for place in range(1, len(sites)):
            sites[place] = following[sites[place - 1]]
    places: dict[str, Point] = {}
    if document["kind"] == "star" and len(sites) > 2:
        # The hub is the only site that sends to more than one other site
        ends = [edge["from"] for edge in edges]
        hub = max(sites, key=ends.count)
        sites.remove(hub)
        places[hub] = (0.0, 0.0)
    for place, site in enumerate(sites):
        # The first site is at the top; the rest follow clockwise
        angle = math.pi / 2 - 2 * math.pi * place / len(sites)
        places[site] = (math.cos(angle), math.sin(angle))
    return places


def _merge_edges(edges: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge each pair of opposite edges with equal weights into one undirected line.

    Args:
        edges: the directed edges, each with 'from', 'to' and 'weight'.

    Returns:
        A dictionary for each line, with 'from', 'to', 'weight' and 'directed'. A merged line has
        'directed' False, and its 'from' is the alphabetically first silo.
    """
    # Directed edge -> weight; of a pair with equal weights only the alphabetically first is drawn
    weights = {(edge["from"], edge["to"]): edge["weight"] for edge in edges}
    lines = []
    for (start, end), weight in weights.items():
        # Without a reverse edge the difference is infinite
        paired = abs(weights.get((end, start), math.inf) - weight) < 1e-9
        if not paired or start < end:
            lines.append({"from": start, "to": end, "weight": weight, "directed": not paired})
    return lines


def _draw_line(axes: Axes, start: Point, end: Point, directed: bool, share: float) -> None:
    """Draw the line of an edge between two silos, with an arrowhead at the end of a directed line.

    Args:
        axes: the panel of the graph.
        start: the position of the silo where the line begins.
        end: the position of the silo where the line ends.
        directed: whether the line has an arrowhead.
        share: the edge's weight as a share of the largest weight. A larger share makes the line
            wider and darker.
    """
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
    """Write a weight on its line, at 40 % of its length, because diagonals cross in the middle."""
    x = start[0] + 0.4 * (end[0] - start[0])
    y = start[1] + 0.4 * (end[1] - start[1])
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    axes.text(x, y, f"{weight:.2f}", ha="center", va="center", fontsize="x-small", bbox=box)


def _draw_sites(axes: Axes, points: Mapping[str, Point]) -> None:
    """Draw each silo as a dot with its name.

    Silos are on a circle, and their names are outside it. The hub of a star is in the centre, and
    its name is below the dot.
    """
    for site, (x, y) in points.items():
        axes.plot([x], [y], "o", markersize=11, color=ORANGE, zorder=2)
        height = _STRETCH * y
        if math.hypot(x, y) < 0.5:  # the hub, in the middle of the circle
            height = y - 0.14
        axes.text(
            _STRETCH * x,
            height,
            site,
            ha=_align_name(x),
            va="center",
            fontsize="small",
            zorder=3,
            bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"},
        )


def _align_name(x: float) -> str:
    """Return matplotlib's alignment of a silo's name at ``x``, so that the name clears the circle.

    The middle of the circle is at 0. A name within 0.2 of it is centred ("center"). To the right, a
    name begins at ``x`` ("left"). To the left, a name ends at ``x`` ("right").
    """
    if abs(x) < 0.2:
        return "center"
    if x > 0:
        return "left"
    return "right"


def _title(document: Mapping[str, Any], weights: Sequence[float]) -> str:
    """Build the graph's title: the kind of topology, the number of links, and their weights.

    A link is a line of the graph, and ``weights`` has the weight of each link. If all weights are
    equal, the title has this weight. If the weights of at most 16 links differ, the title says that
    they are on the lines. With more links, it has the smallest and the largest weight.
    """
    low, high = min(weights), max(weights)
    kind = "weight"
    if "matchings" in document:
        kind = "expected weight"
    start = f"{document['kind']}, {format_count(len(weights), 'link')}"
    if high - low < 1e-9:
        each = " each" if len(weights) > 1 else ""
        return f"{start}: {kind} {high:.3g}{each}"
    if len(weights) <= _LABELLED:
        return f"{start}: {kind}s on the lines"
    return f"{start}: {kind}s {low:.2g} (thin) to {high:.2g} (thick)"


def _draw_times(axes: Axes, document: Mapping[str, Any]) -> None:
    """Draw how long a round takes with each kind of topology, as horizontal bars of seconds.

    The bar of the run's own topology is orange. The title has the size of the model in MB. It says
    "out and back" if ``document["visit-seconds"]`` shows that models visit neighbours, and
    otherwise "one way". If no cycle times were measured, only a text that says so is drawn.
    """
    times = document["cycle-times"]
    if not times:
        missing = "cycle times: not measured,\nthe run was resumed at its end"
        axes.text(0.5, 0.5, missing, ha="center")
        axes.set_axis_off()
        return
    colours, labels = [], []
    for kind, seconds in times.items():
        colours.append(ORANGE if kind == document["kind"] else BLUE)
        labels.append(f"{seconds:.3g} s")
    bars = axes.barh(list(times), list(times.values()), color=colours)
    axes.bar_label(bars, labels, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    exchange = "one way"
    if document["visit-seconds"]:
        exchange = "out and back"
    axes.set_xlabel("seconds of a round: computing, latency and transfer")
    axes.set_title(
        f"cycle time, {document['model-bytes'] / 1e6:.3g} MB a model, {exchange}",
        fontsize="medium",
    )
    axes.spines[["top", "right"]].set_visible(False)
