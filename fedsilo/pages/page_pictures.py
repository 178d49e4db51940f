"""Draws the pictures of pages: narrow enough for a phone, in colours that differ in grey, too."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedsilo.core.drawing.glyphs import fonts_for
from fedsilo.core.drawing.palette import BLUE, CATEGORIES, GREY, LineStyle
from fedsilo.core.drawing.panels import literal
from fedsilo.core.one_line import abbreviate
from fedsilo.models.measures.intervals import Estimate, Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedsilo.models.measures.outcome_counts import Bin

_WIDTH = 4.4  # inches: somewhat narrower than a phone's screen, so that letters can be read
_LEGEND_COLUMNS = 2
_NAME = 24  # largest number of characters of a label; a longer label would squeeze the panel


def curves(
    name: str,
    lines: Mapping[str, Mapping[int, float]],
    styles: Mapping[str, LineStyle],
    label: str,
    over: str = "round",
) -> str:
    """Draw lines over rounds, each with its own colour, marker and dash.

    If there are several lines, a legend names them. A long line has markers on only some of its
    points.

    Args:
        name: the picture's name, unique on its page.
        lines: title of a line -> round -> value.
        styles: title of a line -> its style.
        label: the label of the vertical axis.
        over: the label of the horizontal axis.

    Returns:
        The text of an ``svg`` element.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = _panel(2.9 + 0.2 * (len(lines) // _LEGEND_COLUMNS))
    for title, line in lines.items():
        every = max(1, len(line) // 8)  # markers on each of a hundred rounds hide the line
        look: dict[str, Any] = {"markersize": 5, "markevery": every, "linewidth": 1.5}
        look |= styles[title].options()
        axes.plot(list(line), list(line.values()), label=short_label(title), **look)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(label)
    return _finish_picture(figure, axes, name, over, legend=len(lines) > 1)


@dataclass(frozen=True)
class Band:
    """A point of a line with an interval: its place x, its value, and the interval's ends."""

    x: float
    value: float
    low: float
    high: float


def bands(
    name: str,
    lines: Mapping[str, Sequence[Band]],
    styles: Mapping[str, LineStyle],
    label: str,
    over: str,
) -> str:
    """Draw lines with shaded intervals, each in its own colour, with its own marker and dash.

    A legend names the lines. The vertical axis goes from 0 to 1, and the horizontal axis begins at
    0.

    Args:
        name: the picture's name, unique on its page.
        lines: title of a line -> its points in ascending order of x. A point (``Band``) has its x,
            its value, and the low and the high end of its interval.
        styles: the style of each line, by its title.
        label: the label of the vertical axis.
        over: the label of the horizontal axis.

    Returns:
        The picture as the text of an ``svg`` element.
    """
    figure, axes = _panel(2.9 + 0.2 * (len(lines) // _LEGEND_COLUMNS))
    for title, points in lines.items():
        look: dict[str, Any] = {"markersize": 4, "linewidth": 1.5, **styles[title].options()}
        places = [point.x for point in points]
        lows, highs = [point.low for point in points], [point.high for point in points]
        axes.fill_between(places, lows, highs, color=look["color"], alpha=0.15, linewidth=0)
        values = [point.value for point in points]
        axes.plot(places, values, label=short_label(title), **look)
    axes.set_ylim(0.0, 1.02)
    axes.set_xlim(left=0.0)
    axes.set_ylabel(label)
    return _finish_picture(figure, axes, name, over, legend=True)


def estimates(
    name: str,
    series: Mapping[str, Mapping[str, Estimate]],
    label: str,
    points: Mapping[str, Sequence[float]] | None = None,
) -> str:
    """Draw values in named rows, as points with error bars for their intervals.

    Rows are in the order in which ``series`` first names them, from top to bottom. If there are
    several series, their points in a row are drawn next to each other, and a legend names the
    series.

    Args:
        name: the picture's name, unique on its page.
        series: title of a series -> name of a row -> value, which may have an interval. The markers
            of the first series are filled.
        label: the label of the horizontal axis.
        points: name of a row -> further values, such as one per seed, drawn as small dots. Only
            names of rows in ``series`` are allowed.

    Returns:
        The text of an ``svg`` element.
    """
    from matplotlib.ticker import MaxNLocator

    unique: dict[str, None] = {}
    for by_row in series.values():
        unique |= dict.fromkeys(by_row)
    rows = list(unique)
    figure, axes = _panel(1.1 + 0.34 * len(rows))
    for number, (title, by_row) in enumerate(series.items()):
        # The series of a row are drawn next to each other, centred on the row
        shift = (number - (len(series) - 1) / 2) * 0.3
        values, places = [], []
        for row, estimate in by_row.items():
            values.append(estimate.value)
            places.append(rows.index(row) + shift)
        axes.errorbar(
            values,
            places,
            xerr=_reach(list(by_row.values())),
            fmt="os^D"[number % 4],
            color=CATEGORIES[number % len(CATEGORIES)],
            markerfacecolor="white" if number else CATEGORIES[0],
            markersize=6,
            capsize=3,
            elinewidth=1.2,
            label=title,
        )
    for row, dots in (points or {}).items():
        # Below the mean of the row, so that they do not cover its interval
        axes.plot(dots, [rows.index(row) + 0.25] * len(dots), "o", color=GREY, markersize=4)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_yticks(range(len(rows)), list(map(short_label, rows)))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    return _finish_picture(figure, axes, name, label, legend=len(series) > 1)


def scatter(
    name: str,
    points: Mapping[str, Sequence[tuple[float, float]]],
    styles: Mapping[str, LineStyle],
    over: str,
    label: str,
) -> str:
    """Draw groups of points (x, y), with a colour and a marker for each group.

    A legend has the title of each group.

    Args:
        name: the picture's name, unique on its page.
        points: title of a group -> its points, at least one.
        styles: title of a group -> its style.
        over: the label of the horizontal axis.
        label: the label of the vertical axis.

    Returns:
        The text of an ``svg`` element.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = _panel(2.9 + 0.2 * (len(points) // _LEGEND_COLUMNS))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    for title, places in points.items():
        style = styles[title]
        x, y = zip(*places, strict=True)
        label_ = short_label(title)
        axes.plot(x, y, style.marker, color=style.color, markersize=7, label=label_, alpha=0.8)
    axes.set_ylabel(label)
    return _finish_picture(figure, axes, name, over, legend=True)


def certainty(name: str, bins: Sequence[Bin], label: str, *, diagonal: bool) -> str:
    """Draw how often predictions were right, by how certain the model was of them.

    Each bin is a group of test samples with similar certainty. Its point is at the mean certainty
    (x) and the share of right predictions (y), with a 95 % interval. Lines join the points. The
    number of samples of each bin is written at the bottom of the picture.

    Args:
        name: the picture's name, unique on its page.
        bins: the bins, none of them empty, in ascending order of their mean certainty.
        label: the label of the horizontal axis.
        diagonal: whether to draw the diagonal. If the certainty is the predicted probability, the
            points of a perfectly calibrated model lie on it.

    Returns:
        The text of an ``svg`` element.
    """
    means, shares, values = [], [], []
    for one in bins:
        share = one.share()
        means.append(one.mean)
        shares.append(share)
        values.append(share.value)
    figure, axes = _panel(3.1)
    if diagonal:
        axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1)
    axes.errorbar(
        means,
        values,
        yerr=_reach(shares),
        fmt="o-",
        color=BLUE,
        markersize=5,
        capsize=3,
        linewidth=1,
    )
    for number, one in enumerate(bins):
        # Numbers alternate in height, so that numbers of near bins do not overlap
        look: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": "small"}
        axes.annotate(f"{one.count}", (one.mean, 0.0), (0, 3 + 9 * (number % 2)), **look)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.03)
    axes.set_ylabel("share of right answers")
    return _finish_picture(figure, axes, name, label)


def against_diagonal(
    name: str, points: Sequence[tuple[float, float]], over: str, label: str
) -> str:
    """Draw points (x, y) joined by a line, and the diagonal on which y equals x.

    The diagonal goes from the smallest to the largest of all x and y.

    Args:
        name: the picture's name, unique on its page.
        points: at least one point, in ascending order of x.
        over: the label of the horizontal axis.
        label: the label of the vertical axis.

    Returns:
        The text of an ``svg`` element.
    """
    figure, axes = _panel(3.1)
    x, y = zip(*points, strict=True)
    ends = [min(*x, *y), max(*x, *y)]
    axes.plot(ends, ends, "--", color=GREY, linewidth=1)
    axes.plot(x, y, "o-", color=BLUE, markersize=5, linewidth=1)
    axes.set_ylabel(short_label(label))
    return _finish_picture(figure, axes, name, over)


def short_label(name: str) -> str:
    """Return a name as a picture's label: at most 24 characters, and never read as a formula.

    A longer name is shortened in its middle.
    """
    return literal(abbreviate(name, _NAME, _NAME // 2))


def _panel(height: float) -> tuple[Figure, Axes]:
    """Create a figure with one panel, 4.4 inches wide and ``height`` inches high, with a grid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.35)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _finish_picture(
    figure: Figure, axes: Axes, name: str, over: str, *, legend: bool = False
) -> str:
    """Complete a picture for a page, and return it as the text of an ``svg`` element.

    Args:
        figure: the figure. Its panel already has the data and the label of the vertical axis.
        axes: the figure's only panel.
        name: the picture's name, unique on its page.
        over: the label of the horizontal axis, written below the axis at the right.
        legend: whether to add a legend of the labelled lines, below the panel.
    """
    axes.set_xlabel(over, loc="right")  # long names of rows would take the room in the middle
    if legend:
        figure.legend(loc="outside lower center", ncols=_LEGEND_COLUMNS, fontsize="small")
    return svg_of(figure, name)


def _reach(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Compute the lengths of the error bars for matplotlib.

    Returns:
        Two lists, each with one length per estimate. The first list has the lengths from the value
        down to the interval's lower end, and the second those up to the upper end. An estimate
        without an interval has length 0 in both lists. A length that would be negative, because the
        value is outside its interval, is 0.
    """
    down, up = [], []
    for estimate in estimates:
        # A hospital's noise may move a value out of its interval, and matplotlib refuses lengths
        # below 0
        interval = estimate.interval or Interval(estimate.value, estimate.value)
        down.append(max(0.0, estimate.value - interval.low))
        up.append(max(0.0, interval.high - estimate.value))
    return [down, up]


# Metadata have the time of drawing, but the same run must give the same bytes
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_STYLE = re.compile(r"<defs>\s*<style type=\"text/css\">.*?</style>\s*</defs>", re.DOTALL)


def svg_of(figure: Figure, name: str) -> str:
    """Convert a figure to the text of one ``svg`` element.

    Equal figures with equal names give equal texts. Words in the figure stay text instead of
    becoming outlines, so that they can be searched and read aloud.

    All ids in the element begin with a prefix made from ``name``, so that no two pictures on a page
    share an id. The prefix is ``name`` in lower case, with hyphens in place of all characters
    except letters and digits. If the prefix differs from ``name``, a short digest of ``name`` is
    added to it.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if plain != name:  # two names may become the same without their other characters
        plain += f"-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    text = io.StringIO()
    # Without a salt, matplotlib would draw its ids at random
    options: Any = {"svg.hashsalt": name, "svg.fonttype": "none"}
    with matplotlib.rc_context(options), fonts_for(figure):
        # 'savefig' would draw all of it twice
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(text, metadata=_NO_METADATA)
    svg = text.getvalue()
    # Drop the XML declaration, and the style, which would apply to the whole page
    svg = _STYLE.sub("", svg[svg.index("<svg") :])
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{plain}-", svg).strip()
