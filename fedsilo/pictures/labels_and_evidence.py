"""Draw the labels of each site, and the reliability of the model's certainty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedsilo.core.drawing.palette import CATEGORIES, GREY, LIGHT, colours, line_styles, shades
from fedsilo.core.tasks import CLASSIFICATION
from fedsilo.models.tasks.task import task_named
from fedsilo.pictures.panel_grids import new_figure
from fedsilo.server_app.records.summary import MANY, worst

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NDArray = npt.NDArray[Any]

_LEGEND = 18  # the most names that fit into a legend beside the picture


def draw_evidence(document: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw ``evidence.png``: whether the model's certainty on test samples can be trusted.

    The left panel shows accuracy against confidence, with the diagonal of a perfectly calibrated
    model. The right panel shows accuracy against vacuity. Vacuity is the lack of evidence, from 0
    to 1. Each panel has bars for all sites together, and a line for each site.

    Args:
        document: the content of evidence.json. 'reliability' has bins of confidence, and
            'certainty' has bins of vacuity. Each maps a site, and then a bin number (a string), to
            'count' (samples), 'right' (correct predictions) and 'mean' (mean confidence or
            vacuity).

    Returns:
        File name -> figure.
    """
    figure = new_figure(11.5, 4.6)
    left, right = figure.subplots(1, 2)
    _draw_bins(left, document["reliability"], "confidence")
    left.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1, label="perfectly calibrated")
    left.set_title("Reliability", fontsize="medium")
    _draw_bins(right, document["certainty"], "vacuity (1: no evidence)")
    right.set_title("Accuracy against vacuity", fontsize="medium")
    handles, _ = left.get_legend_handles_labels()
    figure.legend(handles=handles, fontsize="small", loc="outside right upper")
    figure.suptitle("Accuracy on test samples by the model's own certainty", fontsize="medium")
    return {"evidence.png": figure}


def _draw_bins(axes: Axes, sites: Mapping[str, Any], label: str) -> None:
    """Draw accuracy against confidence or vacuity: bars for all sites together, a line per site.

    Bins without samples have no bar and no point. With more than 20 sites, only the five sites with
    the lowest accuracy over all bins have a line.

    Args:
        axes: the panel.
        sites: site -> bin number (a string) -> 'count' (samples), 'right' (correct predictions) and
            'mean' (mean confidence or vacuity).
        label: the label of the horizontal axis.
    """
    shown = list(sites)
    if len(sites) > MANY:
        shown = worst({site: _compute_accuracy(bins) for site, bins in sites.items()})
    for site, style in line_styles(shown).items():
        means, accuracies = [], []
        for cell in sites[site].values():
            if cell["count"]:
                means.append(cell["mean"])
                accuracies.append(cell["right"] / cell["count"])
        axes.plot(
            means,
            accuracies,
            label=site,
            linewidth=1,
            markersize=4,
            alpha=0.8,
            **style.options(),
        )
    _draw_total(axes, _sum_over_sites(sites))
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(f"{label}; numbers: samples")
    axes.set_ylabel("accuracy")
    axes.grid(alpha=0.3)


def _compute_accuracy(bins: Mapping[str, Any]) -> float:
    """Return the accuracy of a site over all bins, to find the sites with the lowest accuracy.

    A site without samples gets 1, so that it comes last among them.
    """
    count = right = 0
    for cell in bins.values():
        count += cell["count"]
        right += cell["right"]
    if not count:
        return 1.0
    return right / count


def _sum_over_sites(sites: Mapping[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Add up the bins of all sites.

    Args:
        sites: site -> bin number (a string) -> 'count' (samples), 'right' (correct predictions) and
            'mean' (mean certainty).

    Returns:
        Bin number -> number of samples, number of correct predictions, and the sum of the samples'
        certainties.
    """
    total: dict[str, tuple[float, float, float]] = {}
    for bins in sites.values():
        for place, cell in bins.items():
            count, right, weighted = total.get(place, (0.0, 0.0, 0.0))
            total[place] = (
                count + cell["count"],
                right + cell["right"],
                weighted + cell["count"] * cell["mean"],
            )
    return total


def _draw_total(axes: Axes, total: Mapping[str, tuple[float, float, float]]) -> None:
    """Draw the accuracy over all sites in each bin as a bar behind the sites' lines.

    The bins divide the range from 0 to 1 equally. Bins without samples have no bar. The number of
    samples is written at the bottom, where x is their mean certainty. ``total`` maps a bin number
    to the number of samples, the number of correct predictions, and the sum of the samples'
    certainties.
    """
    for place, (count, right, weighted) in total.items():
        if not count:
            continue
        # Bins divide 0..1 equally; a bar stands in the middle of its bin and leaves a small gap
        axes.bar(
            int(place) / len(total) + 0.5 / len(total),
            right / count,
            0.9 / len(total),
            color=LIGHT,
            zorder=0,
        )
        axes.text(
            weighted / count,
            0.02,
            f"{count:.0f}",
            ha="center",
            fontsize="x-small",
            zorder=3,  # above the lines of sites whose accuracy is 0
            bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"},
        )


def draw_distribution(silos: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw ``distribution.png``: the number of samples of each class at each site.

    Counts are summed over all splits. The names of the classes are those of the first site, or
    ``class 0``, ``class 1``, ... if it sent none. Up to 20 sites have a bar each, in which the
    classes are stacked. With more sites, box plots show how the counts of each class vary over the
    sites.

    Args:
        silos: the content of silos.json: site -> the facts that it sent, such as label counts.

    Returns:
        File name -> figure; {} if any site does not report its label counts.
    """
    counts_of = {}
    for site, facts in silos.items():
        splits = facts["label_counts"]
        if not splits:
            return {}  # hospitals do not report label counts at trust 'sums'
        counts_of[site] = np.sum(list(splits.values()), axis=0)
    sites = list(silos)
    counts = np.array(list(counts_of.values()))
    first = silos[sites[0]]
    names: Sequence[str] = first.get("classes") or []
    if names:
        names = task_named(first.get("task", CLASSIFICATION)).stratum_names(names)
    if not names:
        names = [f"class {label}" for label in range(counts.shape[1])]
    if len(sites) > MANY:
        return {"distribution.png": _spread_of_labels(counts, names)}
    return {"distribution.png": _stacked_labels(sites, counts, names)}


def _stacked_labels(sites: Sequence[str], counts: NDArray, names: Sequence[str]) -> Figure:
    """Draw a stacked bar for each site, with the number of its samples in each class.

    The total is written above each bar. With more than 18 classes, the legend names only some of
    them, at equal steps.

    Args:
        sites: the names of the sites.
        counts: the number of samples, (sites, classes).
        names: the names of the classes.
    """
    figure = new_figure(3.3 + 0.9 * len(sites), 4.2)
    axes = figure.subplots()
    bottom = np.zeros(len(sites))
    # Shades change gradually from class to class, so a few names in the legend are enough
    named_every = math.ceil(len(names) / _LEGEND)
    colour_of = colours(names) if len(names) <= len(CATEGORIES) else shades(names)
    for label, (name, colour) in enumerate(colour_of.items()):
        heights = counts[:, label]
        shown = name if label % named_every == 0 else None
        axes.bar(sites, heights, bottom=bottom, label=shown, color=colour, edgecolor="white")
        bottom += heights
    for place, total in enumerate(bottom):
        axes.text(place, total, f"{total:.0f}", ha="center", va="bottom", fontsize="x-small")
    axes.set_ylabel("samples, all splits")
    axes.set_xticks(range(len(sites)), sites, rotation=40, ha="right", fontsize="small")
    figure.legend(fontsize="small", loc="outside right upper", reverse=True)
    axes.set_title("Samples of each hospital by class", fontsize="medium")
    return figure


def _spread_of_labels(counts: NDArray, names: Sequence[str]) -> Figure:
    """Draw how the classes are distributed over many sites, in two panels.

    The left panel has a bar for each site's size, in descending order. The right panel has a box
    for each class with its counts over the sites: the median, the middle half, and whiskers for the
    middle 90 %. ``counts`` is (sites, classes).
    """
    figure = new_figure(11.5, 4.2)
    left, right = figure.subplots(1, 2)
    sizes = np.sort(counts.sum(axis=1))[::-1]
    left.bar(range(1, len(sizes) + 1), sizes, width=1.0, color=CATEGORIES[0])
    left.set_xlabel(f"{len(sizes)} sites, largest first")
    left.set_ylabel("samples, all splits")
    right.boxplot(counts, whis=(5, 95), showfliers=False)
    right.set_xticks(range(1, len(names) + 1), names, rotation=40, ha="right", fontsize="small")
    right.set_ylabel("samples of the class at a site")
    right.set_title("median, middle half and middle 90 % of sites", fontsize="small")
    figure.suptitle("Samples of the hospitals by class", fontsize="medium")
    return figure
