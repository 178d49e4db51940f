"""The forest plot of a regression: each hospital's own effect, and all of them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsilo.core.errors import SettingError
from fedsilo.pictures.panel_grids import panel_grid
from fedsilo.pictures.picture_files import write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Estimate and standard error -> middle, low and high end of the interval
Effect = Callable[[float, float], tuple[float, float, float]]


def draw_forest(document: Mapping[str, Any], effect: Effect, ratio: str, path: Path) -> None:
    """Draw a forest plot with a panel for each coefficient, and write it to a file.

    The first rows of a panel are the effects at the hospitals. The fixed and the random effect of a
    meta-analysis over the hospitals follow, if they were computed. The last row is the pooled
    regression.

    Args:
        document: the content of ``fit.json``.
        effect: converts an estimate and its standard error to the middle and the ends of an
            interval, on the scale of the axis.
        ratio: the name of the ratio, such as "odds ratio", for a logarithmic axis; empty for
            coefficients on a linear axis.
        path: the picture's file.

    Raises:
        SettingError: ``document`` lacks the regressions of single hospitals, or ``path`` does not
            end with .png, .svg or .pdf.
    """
    rows = [row for row in document.get("heterogeneity", []) if row["sites"]]
    if not rows:
        raise SettingError(
            "a forest plot needs each hospital's own regression, which only a fit at trust "
            "'server' with 'glm.heterogeneity' has: fit again, or leave out --picture"
        )
    pooled = {row["name"]: row for row in document["coefficients"]}
    height = 0.28 * (len(document["hospitals"]) + 3) + 0.9
    figure, panels = panel_grid(len(rows), 3, (4.2, height))
    for axes, row in zip(panels, rows, strict=True):
        _draw_column(axes, row, pooled[row["name"]], effect)
        axes.set_xlabel(ratio or "coefficient")
        if ratio:
            _use_log_axis(axes)
        else:
            axes.axvline(0.0, color="0.6", linewidth=0.8, zorder=0)
    write_picture(path, figure)


def _draw_column(
    axes: Axes, row: Mapping[str, Any], pooled: Mapping[str, Any], effect: Effect
) -> None:
    """Draw the effects of one coefficient as points with 95 % intervals, a row for each.

    The first rows are the effects at the hospitals. The fixed and the random effect of a
    meta-analysis over the hospitals follow, if they were computed. The last row is the pooled
    regression. The title is the coefficient's name. With a meta-analysis, it also has I², the
    heterogeneity of the hospitals, in percent.

    Args:
        axes: the panel of the coefficient.
        row: the coefficient's entry in ``fit.json`` with each hospital's estimate.
        pooled: the coefficient's entry with the estimate of the pooled regression.
        effect: converts an estimate and its standard error to the middle and the ends of an
            interval.
    """
    entries = [(site, own["estimate"], own["standard-error"]) for site, own in row["sites"].items()]
    hospitals = len(entries)
    title = str(row["name"])
    if "fixed" in row:
        entries.append(("fixed effect", row["fixed"], row["fixed-error"]))
        entries.append(("random effects", row["random"], row["random-error"]))
        title += f"  (I² = {100 * row['i-squared']:.0f} %)"
    entries.append(("pooled regression", pooled["estimate"], pooled["standard-error"]))
    axes.set_title(title, fontsize=10)
    for place, (_, estimate, error) in enumerate(entries):
        middle, low, high = effect(estimate, error)
        colour, marker = "C0", "s"
        if place >= hospitals:
            colour, marker = "C3", "D"
        axes.plot([low, high], [place, place], color=colour, linewidth=1.2)
        axes.plot(middle, place, marker=marker, color=colour, markersize=5)
    _name_rows(axes, [name for name, _, _ in entries])


def _use_log_axis(axes: Axes) -> None:
    """Make the horizontal axis logarithmic, and draw a vertical line at a ratio of 1.

    Whatever its range, the axis gets a few ticks with plain numbers, such as 0.5 or 20.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axes.set_xscale("log")
    axes.axvline(1.0, color="0.6", linewidth=0.8, zorder=0)
    low, high = axes.get_xlim()
    # Within a decade matplotlib's own ticks are written over one another
    if high < 10 * low:
        axes.xaxis.set_major_locator(MaxNLocator(4))
    elif high < 100 * low:
        # Decades alone would leave an axis from 0.2 to 3 with a single number
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    else:
        axes.xaxis.set_major_locator(LogLocator(numticks=5))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
