"""Draw the JSON documents that some methods write: routing, cross, forgotten and buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsilo.core.drawing.palette import BLUE, ORANGE, SALIENCY, SKY, line_styles
from fedsilo.core.drawing.panels import annotated_heat_map, line_legend, without_frame
from fedsilo.core.metric_names import metric_range
from fedsilo.pictures.panel_grids import new_figure, over_rounds, panel_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Matrix = Sequence[Sequence[float]]

_SHARES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
_NARROWEST = 0.01  # smallest height of a violin's part, because many patients may share a weight
# matplotlib's name for a part of a box -> its name in routing.json
_QUANTILES = {"whislo": "q05", "q1": "q25", "med": "q50", "q3": "q75", "whishi": "q95"}

# matplotlib's name for a violin's statistic -> its name in routing.json
_OF_VIOLIN = {"mean": "mean", "median": "q50", "min": "q05", "max": "q95"}


def draw_routing(document: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw how the router of PICSR distributes each hospital's patients over the experts.

    PICSR trains an expert network for each hospital. For each patient, a router weighs the experts
    by the patient's distance to the hospitals' prototypes. A prototype is a hospital's mean
    training sample. One picture shows the distances between prototypes. Two further pictures show
    the weights of each hospital's test samples, as distributions and as a matrix of means. If no
    hospital has weights, only the first picture is drawn.

    Args:
        document: the content of routing.json. Hospitals without weights in it are left out.

    Returns:
        File name -> figure, for 'prototype-distances.png', 'routing.png' and 'routing-matrix.png'.
    """
    experts = document["experts"]
    pictures = {
        "prototype-distances.png": _draw_distances(experts, document["prototype distances"])
    }
    sites, means = {}, []
    for site, weights in document["sites"].items():
        # A site with too few test samples has no metrics of any expert
        if weights and all("mean" in weights[expert] for expert in experts):
            sites[site] = weights
            means.append([weights[expert]["mean"] for expert in experts])
    if sites:
        pictures["routing.png"] = _draw_boxes(experts, sites)
        pictures["routing-matrix.png"] = _draw_matrix(means, list(sites), experts)
    return pictures


def _draw_boxes(experts: Sequence[str], sites: Mapping[str, Any]) -> Figure:
    """Draw the distribution of the router's weights, with a panel for each hospital.

    A panel has a violin, a box and a cross for each expert, with the weight on the vertical axis.
    The violin covers the weights from the 5th to the 95th percentile, the box covers the middle
    half, and the cross marks the mean.

    Args:
        experts: the names of the experts, in the order in which they are drawn.
        sites: hospital -> expert -> 'mean' and the quantiles 'q05', 'q25', 'q50', 'q75' and 'q95'.
            A hospital with few samples has no quantiles.
    """
    figure, panels = panel_grid(len(sites), 4, (2.6, 2.8), (1.6, 0.8), sharey=True)
    for axes, (site, weights) in zip(panels, sites.items(), strict=True):
        _draw_panel(axes, site, [weights[expert] for expert in experts])
        axes.set_xticks(range(1, len(experts) + 1), experts, rotation=40, ha="right")
        axes.tick_params(axis="x", labelsize="small")
    figure.supylabel("router's weight of a test sample")
    figure.suptitle(
        "The experts to which a hospital's patients are routed (violin: 5th to 95th percentile, "
        "width shows the density of patients, from five quantiles; box: quartiles; cross: mean)",
        fontsize="medium",
    )
    return figure


def _draw_panel(axes: Axes, site: str, weights: Sequence[Mapping[str, float]]) -> None:
    """Draw the routing weights of one hospital's patients.

    Each expert has a violin, a box, and a cross at the mean weight. If the hospital sent no
    quantiles, because it had too few samples, only the crosses are drawn, and a text says so.

    Args:
        axes: the hospital's panel.
        site: the hospital's name.
        weights: for each expert, the 'mean' of the weights. The quantiles from 'q05' to 'q95' may
            be missing.
    """
    positions = list(range(1, len(weights) + 1))
    if "q50" in weights[0]:
        _draw_violins(axes, positions, weights)
    else:
        axes.text(
            0.5,
            0.97,
            "too few samples for a violin",
            ha="center",
            va="top",
            fontsize="x-small",
            transform=axes.transAxes,
        )
    axes.plot(positions, [weight["mean"] for weight in weights], "x", color=BLUE)
    axes.set_title(f"patients of {site}", fontsize="small")
    axes.set_ylim(-0.02, 1.02)
    axes.grid(axis="y", alpha=0.3)


def _draw_violins(
    axes: Axes, positions: Sequence[int], weights: Sequence[Mapping[str, float]]
) -> None:
    """Draw a violin and a box at each position, from five quantiles of the weights.

    ``weights`` has a mapping for each position. Its keys are 'mean', and the quantiles 'q05',
    'q25', 'q50', 'q75' and 'q95', where 'q05' is the 5 % quantile. The mean is not drawn.
    """
    boxes, violins = [], []
    for weight in weights:
        boxes.append({box: weight[quantile] for box, quantile in _QUANTILES.items()})
        violins.append(violin_statistics(weight))
    parts: dict[str, Any] = axes.violin(violins, positions, widths=0.85, showextrema=False)
    for body in parts["bodies"]:
        body.set(facecolor=SKY, edgecolor=BLUE, alpha=0.5)
    middle = {"color": ORANGE}
    axes.bxp(boxes, positions=positions, widths=0.2, showfliers=False, medianprops=middle)


def violin_statistics(weight: Mapping[str, float]) -> dict[str, Any]:
    """Convert five quantiles to the statistics that matplotlib's ``Axes.violin`` takes.

    The violin consists of four rectangles, each between two neighbouring quantiles. The width of a
    rectangle shows the density of patients. It is the share of patients between the two quantiles,
    divided by their distance. A distance below 0.01 counts as 0.01.

    Args:
        weight: 'q05', 'q25', 'q50', 'q75', 'q95' and 'mean' of a weight.
    """
    heights: list[float] = []
    widths: list[float] = []
    for low, high in pairwise(_SHARES):
        apart = max(weight[high] - weight[low], _NARROWEST)
        # Two points with the same width, because a part between two quantiles is a rectangle
        heights += [weight[low], weight[high]]
        widths += [(_SHARES[high] - _SHARES[low]) / apart] * 2
    statistics = {name: weight[quantile] for name, quantile in _OF_VIOLIN.items()}
    return {"coords": heights, "vals": widths, **statistics}


def _draw_matrix(weights: Matrix, sites: Sequence[str], experts: Sequence[str]) -> Figure:
    """Draw a heat map of the mean routing weights, with a row per site and a column per expert."""
    figure = new_figure(2.6 + 0.8 * len(experts), 1.8 + 0.6 * len(sites))
    axes = figure.subplots()
    annotated_heat_map(axes, weights, sites, experts, "mean weight of a test sample", top=1.0)
    axes.set_xlabel("expert of")
    axes.set_ylabel("patients of")
    return figure


def _draw_distances(experts: Sequence[str], distances: Mapping[str, Matrix]) -> Figure:
    """Draw two heat maps side by side, with the distances between the hospitals' prototypes.

    A prototype is a hospital's mean training sample. The left map has the distances between the
    prototypes' standardised features, ``distances["input"]``. The right map has the distances
    between the prototypes' embeddings in the router, ``distances["embedded"]``. Rows and columns
    are the ``experts``.
    """
    size = len(experts)
    figure = new_figure(4 + 1.4 * size, 2 + 0.6 * size)
    titles = {"input": "between standardised features", "embedded": "between router embeddings"}
    for axes, (kind, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        annotated_heat_map(axes, distances[kind], experts, experts, title)
    figure.suptitle("Distances between the hospitals' prototypes", fontsize="medium")
    return figure


def draw_cross(document: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw ``cross.png``: how good each hospital's model is at the hospitals that tested it.

    Each metric has a heat map. A row is the hospital that trained the model, and a column the
    hospital that tested it. Colours range up to the metric's upper limit, such as 1. For a metric
    without a limit, they range up to its largest value. A cell without a value shows "-".

    Args:
        document: metric -> its matrix: 'trained' and 'tested' with the names of the hospitals, and
            'values' with a row for each hospital in 'trained'.

    Returns:
        File name -> figure.
    """
    size = max(len(matrix["trained"]) for matrix in document.values())
    figure = new_figure((1.8 + 0.75 * size) * len(document), 2.2 + 0.6 * size)
    panels = figure.subplots(1, len(document), squeeze=False)[0]
    for axes, (metric, matrix) in zip(panels, document.items(), strict=True):
        sites = matrix["trained"], matrix["tested"]
        annotated_heat_map(axes, matrix["values"], *sites, f"test {metric}", top=_largest(metric))
        axes.set_xlabel("tested at")
        axes.set_ylabel("trained at")
    figure.suptitle("Trained at one hospital, tested at another", fontsize="medium")
    return {"cross.png": figure}


def _largest(metric: str) -> float | None:
    """Return 1 for a metric that is at most 1; None for others, such as an error in days."""
    high = metric_range(metric)[1]
    return high if math.isfinite(high) else None


def draw_forgotten(document: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw ``forgotten.png``: the share of training samples that averaging makes each site forget.

    A sample is forgotten if the site's local model predicts it correctly, but the averaged model
    does not. The picture has a line for each site over the epochs, in percent. A share that is None
    has no point. Epochs are numbered from 0 in forgotten.json, and from 1 in the picture.

    Args:
        document: the content of forgotten.json. 'epochs' maps an epoch (a string), and then a site,
            to its share or None. 'variant' is the variant of the training method, and begins the
            title.

    Returns:
        File name -> figure.
    """
    lines: dict[str, dict[int, float]] = {}  # site -> epoch from 1 -> percent
    for epoch in sorted(document["epochs"], key=int):
        for site, share in document["epochs"][epoch].items():
            # A site without a share keeps its place in the legend, with gaps in its line
            line = lines.setdefault(site, {})
            if share is not None:
                line[int(epoch) + 1] = 100 * share
    figure = new_figure(8, 4)
    axes = figure.add_subplot()
    styles = line_styles(sorted(lines))
    for site, style in styles.items():
        line = lines[site]
        axes.plot(list(line), list(line.values()), markersize=4, label=site, **style.options())
    over_rounds(axes)
    axes.set_xlabel("epoch")
    axes.set_ylabel("forgotten training samples, %")
    axes.set_ylim(bottom=0)
    title = f"{document['variant']}: correct by the local model, but wrong by the averaged model"
    figure.suptitle(title, fontsize="medium")
    line_legend(figure, styles)
    return {"forgotten.png": figure}


def draw_buffer(document: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw ``buffer.png``: the attention maps that each hospital sent to the server in FedEvPrompt.

    FedEvPrompt is a method in which hospitals share such maps. A map shows how much the network
    attends to each part of an image. Each hospital has a row, in which the maps of each class stand
    side by side. Each map has a colour scale of its own. If a hospital has fewer maps of a class
    than another hospital, its row has empty places.

    Args:
        document: the content of buffer.json. 'sites' maps a site, and then a class number (a
            string), to a list of maps. A map is a list of values, row by row. 'classes' has the
            names of the classes, or is empty. 'grid' has the number of rows and of columns of a
            map.

    Returns:
        A dictionary with one entry: "buffer.png" -> its figure.
    """
    sites, names = document["sites"], document["classes"]
    first_columns, width = _lay_out_blocks(sites)
    figure = new_figure(1.4 + 0.9 * width, 1.2 + 0.95 * len(sites))
    panels = figure.subplots(len(sites), width, squeeze=False)
    for axes in panels.flatten():
        without_frame(axes)
    for label, first in first_columns.items():
        name = f"class {label}"
        if names:
            name = str(names[int(label)])
        panels[0, first].set_title(name, fontsize="small", loc="left")
    for row, (site, maps) in enumerate(sites.items()):
        panels[row, 0].set_ylabel(site, rotation=0, ha="right", va="center", fontsize="small")
        for label, first in first_columns.items():
            # A site with fewer maps than the block has columns leaves empty panels
            for offset, cells in enumerate(maps.get(label, ())):
                grid = np.reshape(cells, document["grid"])
                panels[row, first + offset].imshow(grid, cmap=SALIENCY)
    figure.suptitle(
        "Attention buffer: rollout maps that each hospital\n"
        "chose to send (each map has its own colour scale)",
        fontsize="medium",
    )
    return {"buffer.png": figure}


def _lay_out_blocks(sites: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, int], int]:
    """Give each class a block of neighbouring columns, in the numeric order of the classes.

    A block has as many columns as the largest number of maps that any site has for the class.

    Args:
        sites: site -> class number (a string, as in JSON) -> the site's maps of the class.

    Returns:
        A pair. The first element maps each class number (a string) to the index of its first
        column, counted from 0. The second element is the total number of columns.
    """
    widths: dict[str, int] = {}
    for maps in sites.values():
        for label, of_class in maps.items():
            widths[label] = max(widths.get(label, 0), len(of_class))
    first_columns: dict[str, int] = {}
    column = 0
    for label in sorted(widths, key=int):  # labels are texts in JSON, and '10' comes before '2'
        first_columns[label] = column
        column += widths[label]
    return first_columns, column
