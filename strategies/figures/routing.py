"""Pictures of a router: whose experts each hospital's patients listen to (PICSR, figure 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Matrix = Sequence[Sequence[float]]


def draw_routing(document: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the pictures of a routing.json: file name -> figure."""
    experts = document["experts"]
    sites = {site: found for site, found in document["sites"].items() if found}
    figures = {"prototype-distances.png": _draw_distances(experts, document["prototype distances"])}
    if sites:
        figures["routing.png"] = _draw_boxes(experts, sites)
        weights = [[found[expert]["mean"] for expert in experts] for found in sites.values()]
        figures["routing-matrix.png"] = _draw_matrix(weights, list(sites), experts)
    return figures


def _draw_boxes(experts: Sequence[str], sites: Mapping[str, Any]) -> Figure:
    """Draw a panel per hospital, a box per expert: quartiles, whiskers at 5 and 95 percent."""
    from matplotlib.figure import Figure

    columns = min(4, len(sites))
    rows = -(-len(sites) // columns)
    figure = Figure(figsize=(1.6 + 2.6 * columns, 0.8 + 2.8 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axes, (site, found) in zip(panels, sites.items(), strict=False):
        _draw_panel(axes, site, experts, found)
    for axes in panels[len(sites) :]:
        axes.set_axis_off()
    figure.supylabel("router's weight of a test sample")
    figure.suptitle(
        "Which experts a hospital's patients are routed to (box: quartiles, whiskers: 5 and 95 %, "
        "cross: mean)",
        fontsize="medium",
    )
    return figure


def _draw_panel(axes: Axes, site: str, experts: Sequence[str], found: Mapping[str, Any]) -> None:
    means = [found[expert]["mean"] for expert in experts]
    positions = list(range(1, len(experts) + 1))
    if "q50" in found[experts[0]]:
        boxes = [
            {
                "whislo": found[expert]["q05"],
                "q1": found[expert]["q25"],
                "med": found[expert]["q50"],
                "q3": found[expert]["q75"],
                "whishi": found[expert]["q95"],
            }
            for expert in experts
        ]
        axes.bxp(boxes, positions=positions, widths=0.6, showfliers=False)
    else:
        axes.text(
            0.5,
            0.97,
            "too few samples for a box",
            ha="center",
            va="top",
            fontsize="x-small",
            transform=axes.transAxes,
        )
    axes.plot(positions, means, "x", color="tab:blue")
    axes.set_title(f"patients of {site}", fontsize="small")
    axes.set_xticks(positions, experts, rotation=40, ha="right", fontsize="small")
    axes.set_ylim(-0.02, 1.02)
    axes.grid(axis="y", alpha=0.3)


def _draw_matrix(weights: Matrix, sites: Sequence[str], experts: Sequence[str]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(2.6 + 0.8 * len(experts), 1.8 + 0.6 * len(sites)), layout="constrained"
    )
    axes = figure.subplots()
    _heat_map(axes, weights, sites, experts, "mean weight of a test sample", "Blues", most=1.0)
    axes.set_xlabel("expert of")
    axes.set_ylabel("patients of")
    return figure


def _draw_distances(experts: Sequence[str], distances: Mapping[str, Matrix]) -> Figure:
    from matplotlib.figure import Figure

    size = len(experts)
    figure = Figure(figsize=(4 + 1.4 * size, 2 + 0.6 * size), layout="constrained")
    titles = {"input": "of standardised features", "embedded": "as the router embeds them"}
    for axes, (kind, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        _heat_map(axes, distances[kind], experts, experts, title, "Oranges")
    figure.suptitle("Distances between the hospitals' prototypes", fontsize="medium")
    return figure


def _heat_map(
    axes: Axes,
    values: Matrix,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    colours: str,
    most: float | None = None,
) -> None:
    top = most or max(max(row) for row in values) or 1.0
    axes.imshow(values, cmap=colours, vmin=0.0, vmax=top)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            dark = value > 0.6 * top
            axes.text(
                x,
                y,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize="small",
                color="white" if dark else "black",
            )
    axes.set_xticks(range(len(columns)), columns, rotation=40, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_title(title, fontsize="small")
