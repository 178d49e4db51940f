"""The pictures of a survey: shares by site, of classes and of features in the schema's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsilo.core.drawing.palette import GREY, line_styles
from fedsilo.core.drawing.panels import literal
from fedsilo.core.survey import Count, MeasuredFeature, Survey
from fedsilo.pages.number_texts import BINARY
from fedsilo.pages.page import Picture
from fedsilo.pages.page_pictures import short_label, svg_of
from fedsilo.pictures.panel_grids import new_figure
from fedsilo.reports.survey.document import Between, cell_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_FEATURES = 16  # that are painted, the most different first
_MAX_SITES = 10  # more colours are hard to distinguish
_MAX_LENGTH = 18  # characters of a label below the axis


def label_picture(answers: Mapping[str, Survey]) -> Picture | None:
    """Return the shares of labels of training samples, or None if there is nothing to paint."""
    classes = next(iter(answers.values())).about.classes
    known = {
        site: answer.labels["train"]
        for site, answer in answers.items()
        if answer.labels and "train" in answer.labels and answer.about.classes == classes
    }
    return _picture("labels", "Labels", classes, known, answers)


def feature_pictures(answers: Mapping[str, Survey], distances: Sequence[Between]) -> list[Picture]:
    """Return a picture of each feature in the schema's order; of many, the most different."""
    declared = [f for a in answers.values() for f in a.about.features if f.cells]
    first = {feature.name: feature for feature in reversed(declared)}
    order = list(dict.fromkeys(feature.name for feature in declared))
    most = list(dict.fromkeys([*(one.feature for one in distances), *order]))[:_MAX_FEATURES]
    pictures = []
    for place, feature in enumerate(first[name] for name in order if name in most):
        names, known = cell_names(feature), training_counts(feature, answers)
        pictures.append(_picture(f"feature-{place}", feature.name, names, known, answers))
    return [picture for picture in pictures if picture]


def training_counts(
    feature: MeasuredFeature, answers: Mapping[str, Survey]
) -> dict[str, Sequence[Count]]:
    """Return each site's counts of a feature, of the sites that declare it so and send them."""
    counts = {
        site: (answer.histograms or {}).get("train", {}).get(feature.name)
        for site, answer in answers.items()
        if feature in answer.about.features
    }
    return {site: cells for site, cells in counts.items() if cells is not None}


def _picture(
    key: str,
    title: str,
    cells: Sequence[str],
    counts: Mapping[str, Sequence[Count]],
    answers: Mapping[str, Survey],
) -> Picture | None:
    shown = dict(list(counts.items())[:_MAX_SITES])
    every = [count for of_site in shown.values() for count in of_site]
    if not any(every):
        return None
    hidden = every.count(None)
    left = len(counts) - len(shown)
    kind = "yes or no, " if is_binary(cells) else ""
    caption = f"{title}: {kind}share of the training samples"
    caption += f"; {hidden} suppressed counts are hatched" if hidden else ""
    caption += f"; {left} more sites are in the tables" if left else ""
    svg = svg_of(_bars(title, cells, shown, answers), key)
    return Picture(svg, f"Bars of {title} by site; the table has the counts", caption)


def is_binary(cells: Sequence[str]) -> bool:
    """Return whether a feature's cells are those of a number that is 0 or 1."""
    return tuple(cells[:2]) == BINARY


def _bars(
    title: str,
    cells: Sequence[str],
    counts: Mapping[str, Sequence[Count]],
    answers: Mapping[str, Survey],
) -> Figure:
    figure = new_figure(5.0, 3.3)
    axes = figure.subplots()
    places, width = np.arange(len(cells)), 0.8 / len(counts)
    hidden: list[float] = []
    for number, ((site, own), style) in enumerate(
        zip(counts.items(), line_styles(list(counts)).values(), strict=True)
    ):
        total = (answers[site].samples or {}).get("train") or sum(c or 0 for c in own)
        at = places + (number - (len(counts) - 1) / 2) * width
        shares = [np.nan if count is None else count / total for count in own]
        axes.bar(at, shares, width, color=style.color, label=short_label(site))
        for x, count in zip(at, own, strict=True):
            if count == 0:
                axes.annotate("0", (x, 0), ha="center", va="bottom", fontsize="x-small")
            elif count is None:
                hidden.append(x)
    if hidden:
        _draw_hidden(axes, hidden, width)
    axes.set_xticks(
        places, [literal(cell[:_MAX_LENGTH]) for cell in cells], rotation=45, ha="right"
    )
    axes.set_ylabel("share")
    axes.set_title(literal(title), fontsize="medium")
    axes.set_ylim(bottom=0.0)
    axes.tick_params(labelsize="small")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return figure


def _draw_hidden(axes: Axes, places: Sequence[float], width: float) -> None:
    """Draw a hatched bar with a question mark at each suppressed count: unlike a zero."""
    height = 0.07 * axes.get_ylim()[1]
    look: dict[str, Any] = {"color": "white", "edgecolor": GREY, "hatch": "////", "linewidth": 0.5}
    axes.bar(places, height, width, label="suppressed", **look)
    for x in places:
        axes.annotate("?", (x, height), ha="center", va="bottom", fontsize="small", color=GREY)
