"""Kaplan-Meier curves: the share of each site's test patients without the event, over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fedsilo.core.drawing.palette import LineStyle, line_styles
from fedsilo.core.drawing.panels import literal
from fedsilo.models.measures.survival_curves import CurvePoint, read_curve
from fedsilo.pictures.panel_grids import panel_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def site_curves(rows: Iterable[Mapping[str, str]]) -> dict[str, list[CurvePoint]]:
    """Collect the Kaplan-Meier curves that the sites have published of their test patients.

    Only rows with the split "test" and a metric that begins with ``survival.`` are used.

    Args:
        rows: rows of metrics.csv, with round, site, split, metric and value.

    Returns:
        Site -> points in the order of time, with the sites in alphabetical order. A point has its
        time, the share of patients without the event with its 95 % interval, and the number of
        patients still followed. Sites without a curve are left out.
    """
    values_of: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["split"] == "test" and row["metric"].startswith("survival."):
            values_of.setdefault(row["site"], {})[row["metric"]] = float(row["value"])
    curves = {}
    for site, values in sorted(values_of.items()):
        points = read_curve(values)
        if points:
            curves[site] = points
    return curves


def draw_survival(rows: Iterable[Mapping[str, str]]) -> dict[str, Figure]:
    """Draw each site's survival curve with its 95 % confidence band, in a panel for each site.

    The number of patients who are still followed is written below the curve, at six points at most.
    All panels have the same axes, so hospitals can be compared.

    Args:
        rows: rows of metrics.csv.

    Returns:
        ``survival.png`` -> figure; {} if no site has published a curve.
    """
    curves = site_curves(rows)
    if not curves:
        return {}
    styles = line_styles(sorted(curves))
    figure, panels = panel_grid(len(curves), 3, (3.4, 2.8), (0.4, 0.6), sharex=True, sharey=True)
    for axes, (site, points) in zip(panels, curves.items(), strict=True):
        _draw_curve(axes, points, styles[site])
        axes.set_title(literal(site), fontsize="medium")
        axes.tick_params(labelbottom=True)
    panels[0].set_ylim(0.0, 1.02)
    panels[0].set_xlim(left=0.0)
    figure.supylabel("share without the event", fontsize="medium")
    figure.supxlabel("time; the numbers are patients still followed", fontsize="medium")
    figure.suptitle("Kaplan-Meier curves of the test patients, 95 % band", fontsize="medium")
    return {"survival.png": figure}


def _draw_curve(axes: Axes, points: list[CurvePoint], style: LineStyle) -> None:
    """Draw a survival curve with its 95 % band.

    The curve starts at time 0 with a share of 1. Straight lines join the points, because the steps
    between them are unknown. Numbers at the bottom of the panel say how many patients are still
    followed. There is a number for the first point and for every n-th point after it. n is the
    smallest step that gives at most six numbers.
    """
    times, shares = [0.0], [1.0]
    low, high = [1.0], [1.0]
    for point in points:
        times.append(point.time)
        shares.append(point.share)
        low.append(point.low)
        high.append(point.high)
    colour = style.options()["color"]
    axes.fill_between(times, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(times, shares, marker="o", markersize=3, color=colour)
    # Numbers at risk; at most six fit below a panel
    for point in points[:: -(-len(points) // 6)]:
        axes.annotate(
            str(point.followed), (point.time, 0.03), ha="center", fontsize="x-small", color="0.3"
        )
    axes.grid(visible=True, alpha=0.3)
