"""The pictures of a benchmark: average ranks with the critical difference, metrics over bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from benchmarks.ranking.ranks import Ranking
from fedsilo.core.methods import title_of
from fedsilo.pictures.panel_grids import panel_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

_COLUMNS = 3
_DECADES_WITH_3 = 1000  # up to this ratio of bytes, an axis has labels at 1 and 3 of each decade
# Where a name may stand: its offset from the point in typographic points, and its alignment
_SIDES = (
    ((4, 3), "left", "bottom"),
    ((-4, 3), "right", "bottom"),
    ((4, -3), "left", "top"),
    ((-4, -3), "right", "top"),
)


def draw_ranks(rankings: Mapping[str, Ranking]) -> Figure:
    """Return a panel per ranking: methods by average rank; within the bar of the best, no worse."""
    longest = max(len(one.ranks) for one in rankings.values())
    figure, panels = panel_grid(len(rankings), len(rankings), (4.6, 1.4 + 0.2 * longest))
    for axes, (title, one) in zip(panels, rankings.items(), strict=True):
        names, ranks = list(one.ranks), list(one.ranks.values())
        axes.scatter(ranks, range(len(names)), color="#1f5fa8", zorder=3)
        if one.difference and ranks:
            axes.axvspan(ranks[0], ranks[0] + one.difference, color="#d9dde2", zorder=0)
        axes.set_yticks(range(len(names)), [title_of(name) for name in names], fontsize="small")
        axes.invert_yaxis()
        axes.set_xlim(0, len(names) + 1)
        axes.grid(axis="x", alpha=0.3)
        axes.set_xlabel("average rank")
        axes.set_title(title, fontsize="medium")
    return figure


def draw_costs(results: pd.DataFrame) -> Figure:
    """Draw a panel per experiment: the mean test metric over the kilobytes of a run.

    Named are FedAvg and the methods that no method with as few bytes beats by a tenth of a point.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    parts = dict(list(results.groupby("experiment", sort=False)))
    figure, panels = panel_grid(len(parts), _COLUMNS, (4.4, 3.6))
    for axes, (experiment, part) in zip(panels, parts.items(), strict=True):
        axes.scatter(part["kilobytes"], part["mean"], s=14, color="#1f5fa8")
        axes.set_xscale("log")
        # Over many decades, labels at 1 and 3 would touch
        is_wide = part["kilobytes"].max() > _DECADES_WITH_3 * part["kilobytes"].min()
        axes.xaxis.set_major_locator(LogLocator(subs=(1,) if is_wide else (1, 3)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("kilobytes of a run, to and from all sites")
        axes.set_ylabel(f"test {part['metric'].iloc[0]}")
        axes.set_title(str(experiment), fontsize="medium")
        axes.grid(alpha=0.3)
        _name_points(axes, _named(part))
    return figure


def _name_points(axes: Axes, rows: Iterable[Mapping[Any, Any]]) -> None:
    """Write each row's method beside its point, on the first side where no other name is.

    If there is a name on every side, the method gets no name. The scales must be final.
    """
    taken: list[Bbox] = []
    for row in rows:
        place = (row["kilobytes"], row["mean"])
        for offset, across, along in _SIDES:
            text = axes.annotate(
                title_of(row["method"]),
                place,
                offset,
                textcoords="offset points",
                fontsize=7,
                ha=across,
                va=along,
            )
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def _named(part: pd.DataFrame) -> Iterator[dict[Any, Any]]:
    """Yield FedAvg's row, and the rows that no row with as few bytes beats, cheapest first.

    Means are compared as the page shows them, in tenths of a point.
    """
    best = float("-inf")
    cheapest_first = part.sort_values(["kilobytes", "mean"], ascending=[True, False])
    for row in cheapest_first.to_dict("records"):
        shown = round(row["mean"], 3)
        if shown > best or row["method"] == "fedavg":
            yield row
        best = max(best, shown)
