"""The pictures of a survey: distributions of labels and features by site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsilo.core.drawing.palette import GREY, line_styles
from fedsilo.core.drawing.panels import literal
from fedsilo.core.survey import Count, MeasuredFeature, Survey
from fedsilo.pages.page import BINARY, Picture
from fedsilo.pages.page_pictures import short_label, svg_of
from fedsilo.pictures.panel_grids import new_figure
from fedsilo.reports.survey.document import Between, SurveyDocument

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Answers = Mapping[str, Survey]  # site -> its answer

_MAX_FEATURES = 16  # largest number of features that are drawn
_MAX_SITES = 10  # more colours are hard to distinguish
_MAX_LENGTH = 18  # largest number of characters of a label below the axis


def label_picture(answers: Answers) -> Picture | None:
    """Draw the share of each class in the training samples of each site.

    A site is left out if it sent no label counts, or if its classes differ from those of the first
    site. Only the first ten of the remaining sites are drawn. If no drawn count is above 0, the
    result is None. ``answers`` must not be empty.
    """
    classes = next(iter(answers.values())).about.classes
    counts = {}
    for site, answer in answers.items():
        if answer.labels and "train" in answer.labels and answer.about.classes == classes:
            counts[site] = answer.labels["train"]
    return _picture("labels", "Labels", classes, counts, answers)


def feature_pictures(document: SurveyDocument, distances: Sequence[Between]) -> list[Picture]:
    """Draw the distribution of each feature, in the order of the schema.

    If there are more than 16 features, only the 16 with the largest distance between any two sites
    are drawn. Features without a distance rank last. A feature without any known count above 0 is
    skipped.

    Args:
        document: the sites' answers; a feature is drawn as the first site declares it.
        distances: the distances between sites in their features, largest first.
    """
    answers = document.sites
    declared: dict[str, MeasuredFeature] = {}
    for answer in answers.values():
        for feature in answer.about.features:
            if feature.cells:
                declared.setdefault(feature.name, feature)
    # Features without a distance come last, as if they differed least
    by_distance = dict.fromkeys(between.feature for between in distances) | dict.fromkeys(declared)
    most_different = list(by_distance)[:_MAX_FEATURES]
    chosen = [feature for name, feature in declared.items() if name in most_different]
    pictures = []
    for place, feature in enumerate(chosen):
        counts = training_counts(feature, answers)
        key = f"feature-{place}"
        title, cells = document.title(feature.name), document.cell_titles(feature)
        drawn = _picture(key, title, cells, counts, answers)
        if drawn:
            pictures.append(drawn)
    return pictures


def training_counts(feature: MeasuredFeature, answers: Answers) -> dict[str, Sequence[Count]]:
    """Collect the counts of a feature in each site's training samples.

    A site is left out if it declares the feature differently, or sends no counts of it.

    Returns:
        Site -> the count in each cell, which is a category or a range of values.
    """
    counts: dict[str, Sequence[Count]] = {}
    for site, answer in answers.items():
        if feature not in answer.about.features:
            continue
        cells = (answer.histograms or {}).get("train", {}).get(feature.name)
        if cells is not None:
            counts[site] = cells
    return counts


def _picture(
    key: str,
    title: str,
    cells: Sequence[str],
    counts: Mapping[str, Sequence[Count]],
    answers: Answers,
) -> Picture | None:
    """Draw the distribution of a variable as bars, for the first ten sites with counts.

    Suppressed counts are hatched. The caption says how many counts are suppressed, and how many
    further sites appear only in the page's tables. If no drawn count is above 0, the result is
    None.

    Args:
        key: the picture's name, unique on its page.
        title: the title of the variable.
        cells: the names of the cells, which are the variable's categories or ranges of values.
        counts: site -> its count in each cell; None for a suppressed count.
        answers: site -> its answer to the survey.
    """
    # Before the check for counts, because only these sites would have bars
    shown = dict(list(counts.items())[:_MAX_SITES])
    every: list[Count] = []
    for of_site in shown.values():
        every += of_site
    if not any(every):
        return None
    caption = f"{title}: share of the training samples"
    if is_binary(cells):
        caption = f"{title}: yes or no, share of the training samples"
    hidden = every.count(None)
    if hidden:
        caption += f"; {hidden} suppressed counts are hatched"
    more_sites = len(counts) - len(shown)
    if more_sites:
        caption += f"; {more_sites} more sites are in the tables"
    svg = svg_of(_bars(title, cells, shown, answers), key)
    return Picture(svg, f"Bars of {title} by site; the table has the counts", caption)


def is_binary(cells: Sequence[str]) -> bool:
    """Tell whether a feature's cells are named as for a number that is 0 or 1."""
    return tuple(cells[:2]) == BINARY


def _bars(
    title: str,
    cells: Sequence[str],
    counts: Mapping[str, Sequence[Count]],
    answers: Answers,
) -> Figure:
    """Draw the distribution of a variable over the sites: a group of bars for each cell.

    A cell is a category or a range of values. Each site has a bar in each group, as high as the
    cell's share of the site's training samples. A count of 0 is marked "0". A suppressed count has
    a hatched bar with a question mark. The legend names the sites.

    Args:
        title: the title of the variable.
        cells: the names of the cells, which are shortened on the axis.
        counts: site -> its count in each cell; None for a suppressed count.
        answers: site -> its answer to the survey, with its number of training samples.
    """
    figure = new_figure(5.0, 3.3)
    axes = figure.subplots()
    places, width = np.arange(len(cells)), 0.8 / len(counts)
    hidden: list[float] = []
    styles = line_styles(list(counts))
    for number, (site, own) in enumerate(counts.items()):
        total = _training_samples(answers[site], own)
        # The bars of a cell stand side by side, centred on the cell's tick
        at = places + (number - (len(counts) - 1) / 2) * width
        shares = []
        for x, count in zip(at, own, strict=True):
            if count is None:
                shares.append(np.nan)
                hidden.append(x)
                continue
            shares.append(count / total)
            # A zero is written, because an empty place could also be a missing count
            if count == 0:
                axes.annotate("0", (x, 0), ha="center", va="bottom", fontsize="x-small")
        axes.bar(at, shares, width, color=styles[site].color, label=short_label(site))
    # Drawn last, because their height depends on that of the other bars
    if hidden:
        _draw_hidden(axes, hidden, width)
    labels = [literal(cell[:_MAX_LENGTH]) for cell in cells]
    axes.set_xticks(places, labels, rotation=45, ha="right")
    axes.set_ylabel("share")
    axes.set_title(literal(title), fontsize="medium")
    axes.set_ylim(bottom=0.0)
    axes.tick_params(labelsize="small")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return figure


def _training_samples(answer: Survey, counts: Sequence[Count]) -> int:
    """Return a site's number of training samples, to convert its counts to shares.

    If the site suppressed the number or did not send it, the result is the sum of the known
    ``counts``.
    """
    total = (answer.samples or {}).get("train")
    return total or sum(count for count in counts if count)


def _draw_hidden(axes: Axes, places: Sequence[float], width: float) -> None:
    """Draw a hatched bar with a question mark at each of ``places``, where a count is suppressed.

    Without a bar, a reader would take the count for zero. ``places`` are the x coordinates of the
    bars' centres, and ``width`` is in the unit of the x axis.
    """
    height = 0.07 * axes.get_ylim()[1]
    look: dict[str, Any] = {"color": "white", "edgecolor": GREY, "hatch": "////", "linewidth": 0.5}
    axes.bar(places, height, width, label="suppressed", **look)
    for x in places:
        axes.annotate("?", (x, height), ha="center", va="bottom", fontsize="small", color=GREY)
