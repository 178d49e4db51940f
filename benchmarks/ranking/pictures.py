"""The pictures of a benchmark: average ranks with the critical difference, metrics over bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from benchmarks.ranking.ranks import Ranking
from fedsilo.core.methods import title_of
from fedsilo.pictures.panel_grids import panel_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 3


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
    """Return a panel per experiment: the mean test figure over the kilobytes of a run.

    Named are FedAvg and the methods that none beats in both.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    parts = dict(list(results.groupby("experiment", sort=False)))
    figure, panels = panel_grid(len(parts), _COLUMNS, (4.4, 3.6))
    for axes, (experiment, part) in zip(panels, parts.items(), strict=True):
        axes.scatter(part["kilobytes"], part["mean"], s=14, color="#1f5fa8")
        for row in _named(part):
            text, place = title_of(row["method"]), (row["kilobytes"], row["mean"])
            axes.annotate(text, place, (3, 3), textcoords="offset points", fontsize=7)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("kilobytes of a run, to and from all sites")
        axes.set_ylabel(f"test {part['metric'].iloc[0]}")
        axes.set_title(str(experiment), fontsize="medium")
        axes.grid(alpha=0.3)
    return figure


def _named(part: pd.DataFrame) -> Iterator[dict[Any, Any]]:
    """Yield FedAvg's row, and those of which no row with as few bytes has a better figure."""
    best = float("-inf")
    cheapest_first = part.sort_values(["kilobytes", "mean"], ascending=[True, False])
    for row in cheapest_first.to_dict("records"):
        if row["mean"] > best or row["method"] == "fedavg":
            yield row
        best = max(best, row["mean"])
