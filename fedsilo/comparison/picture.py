"""Draws a comparison: a panel per metric, and a bar per experiment at each site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from fedsilo.comparison.tables import over_seeds
from fedsilo.core.drawing.palette import colours
from fedsilo.pictures.learning_curves import CURVES
from fedsilo.pictures.panel_grids import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEGEND_COLUMNS = 3
_WIDTH = 0.84  # width of all bars at a site together; the distance between sites is 1


def draw_comparison(results: pd.DataFrame, split: str) -> Figure:
    """Draw each experiment's mean over seeds at each site, with the standard deviation.

    Args:
        results: a tidy table, see ``tables``.
        split: the split of the samples, for the title.
    """
    spreads = over_seeds(results)
    metrics = list(spreads["metric"].unique())
    experiments = list(spreads["experiment"].unique())
    groups = list(spreads["group"].unique())
    width = 1.2 + len(groups) * max(0.6, 0.17 * len(experiments) + 0.2)
    figure = new_figure(max(5.0, width), 0.9 + 2.0 * len(metrics))
    panels = figure.subplots(len(metrics), 1, squeeze=False, sharex=True)[:, 0]
    for axes, metric in zip(panels, metrics, strict=True):
        _draw_panel(axes, spreads[spreads["metric"] == metric], groups, colours(experiments))
        axes.set_ylabel(CURVES.get(metric, metric))
    panels[-1].set_xticks(range(len(groups)), groups)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=_LEGEND_COLUMNS, fontsize="small"
    )
    figure.suptitle(f"{split} samples, mean and sd over seeds", fontsize="medium")
    return figure


def _draw_panel(
    axes: Axes, spreads: pd.DataFrame, groups: Sequence[str], coloured: Mapping[str, str]
) -> None:
    """Draw one metric: a bar per experiment at each group that has it."""
    each = _WIDTH / len(coloured)
    for number, (name, colour) in enumerate(coloured.items()):
        here = spreads[spreads["experiment"] == name].set_index("group").reindex(list(groups))
        # A single seed has no deviation to draw
        errors = here["sd"].tolist() if (here["seeds"] > 1).any() else None
        left = -_WIDTH / 2 + (number + 0.5) * each
        axes.bar(
            [place + left for place in range(len(groups))],
            here["mean"].tolist(),
            each,
            yerr=errors,
            error_kw={"elinewidth": 0.8, "capsize": 1.5},
            label=name,
            color=colour,
            edgecolor="white",
            linewidth=0.5,
        )
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
