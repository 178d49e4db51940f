"""A line for each site or group, or if there are too many to distinguish, their spread.

For more than ``MANY`` the median is drawn over bands with half and nine tenths of them, and the
five that end worst by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fedsilo.models.figures.palette import BLACK, GREY, LIGHT, LineStyle, line_styles
from fedsilo.server_app.records.many_sites import MANY, worst

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = Mapping[str, Mapping[int, float]]
_BANDS = ((0.05, 0.95, LIGHT), (0.25, 0.75, GREY))


def draw_lines(
    axes: Axes, lines: Series, styles: Mapping[str, LineStyle], *, high_is_worse: bool = False
) -> None:
    """Draw ``lines``, name -> round -> value, as ``styles`` say, or of many their spread."""
    many = len(lines) > MANY
    if many:
        _draw_spread(axes, lines)
        last = {name: line[max(line)] for name, line in lines.items()}
        lines = {name: lines[name] for name in worst(last, high_is_worse=high_is_worse)}
        styles = line_styles(list(lines))
    for name, line in lines.items():
        style = styles[name].options()
        axes.plot(list(line), list(line.values()), label=name, markersize=4, **style)
    if many:
        axes.legend(fontsize="x-small")


def _draw_spread(axes: Axes, lines: Series) -> None:
    rounds = sorted({round_ for line in lines.values() for round_ in line})
    at = [[line[round_] for line in lines.values() if round_ in line] for round_ in rounds]
    for low, high, colour in _BANDS:
        edges = np.array([np.quantile(values, (low, high)) for values in at])
        label = f"{low:.0%} to {high:.0%} of {len(lines)}"
        axes.fill_between(rounds, *edges.T, color=colour, alpha=0.6, linewidth=0, label=label)
    axes.plot(rounds, [np.median(values) for values in at], color=BLACK, label="median")
