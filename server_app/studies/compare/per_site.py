"""``fedsilo bars``: figures of finished runs site by site (UEFL's figures 1 and 5).

A bar is an experiment of ``fedsilo compare`` at a site: the mean over its seeds, with their
standard deviation. A run's model and, if wanted, each site's own model before the average.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from fedsilo.datasets.io.atomic_files import write_atomically
from fedsilo.models.contract.errors import RunDirectoryError, SettingError
from fedsilo.models.contract.one_line import one_line
from fedsilo.models.figures.palette import GREY, colours
from fedsilo.server_app.records.recorder import ALL
from fedsilo.server_app.studies.compare.over_setting import (
    SweptRun,
    finished_runs,
    read_run,
    refuse_other_settings,
)
from fedsilo.server_app.studies.compare.results import matching
from fedsilo.server_app.studies.compare.tables import csv_text, deviation, mean
from fedsilo.server_app.studies.figures.learning_curves import CURVES, write_picture
from fedsilo.server_app.studies.figures.panels import new_figure
from fedsilo.server_app.studies.finished_run import FinishedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_USUAL = ("accuracy", "entropy", "perplexity")
_LEGEND_COLUMNS = 3
_OWN = "trained-"  # a site's own model, right after its training
_KEY = ["metric", "experiment", "site", "distribution"]


@dataclass(frozen=True)
class SiteBars:
    """Figures by site: ``table`` has ``metric, experiment, site, distribution, mean, sd, seeds``.

    ``title`` says of which samples and round they are.
    """

    table: pd.DataFrame
    title: str

    def write(self, csv: Path | None, picture: Path) -> None:
        """Write the figures as CSV, and draw them as PNG."""
        if csv:
            write_atomically(csv, csv_text(self.table))
        write_picture(picture, draw_bars(self))


def site_bars(
    folders: Sequence[Path],
    *,
    metrics: str | None = None,
    split: str = "test",
    round_: int | None = None,
    own: bool = False,
) -> SiteBars:
    """Return the figures of finished runs by site.

    ``metrics`` are names and patterns, separated by commas, or None for accuracy, entropy and
    perplexity; ``round_`` is None for the last of each run. ``own`` adds each site's own model
    before the average, on validation samples.

    Raises:
        SettingError: no run has the metric or the round, or own models are wanted on test data.
        RunDirectoryError: a folder holds no finished run, sites are not the same, or runs of one
            name differ in more than their seed.
    """
    split = "val" if own else split
    runs = finished_runs(folders)
    _refuse_unlike(runs, split)
    cells = pd.DataFrame(
        [cell for run in runs for cell in _cells(run, split, round_, own)],
        columns=[*_KEY, "value"],
    )
    if cells.empty:
        raise SettingError(f"no run has {split} figures by site, only of all sites together")
    known = sorted(cells["metric"].unique())
    usual = ",".join(metric for metric in _USUAL if metric in known)
    chosen = matching(metrics or usual or _USUAL[0], known, "--metrics")
    ordered = pd.concat([cells[cells["metric"] == metric] for metric in chosen])
    grouped = ordered.groupby(_KEY, sort=False)["value"]
    table = grouped.agg(mean=mean, sd=deviation, seeds="size").reset_index()
    when = "the last round" if round_ is None else f"round {round_}"
    return SiteBars(table, f"{runs[0].settings.common.dataset}, {split} samples, {when}")


def _refuse_unlike(runs: Sequence[FinishedRun], split: str) -> None:
    dataset, groups = runs[0].settings.common.dataset, _groups(runs[0])
    first: dict[str, SweptRun] = {}
    seeds: dict[tuple[str, object], Path] = {}
    for run in runs:
        read = read_run(run, split)
        refuse_other_settings(first.setdefault(read.line, read), read)
        other = seeds.setdefault((read.line, read.settings["seed"]), run.path)
        if other != run.path:
            raise RunDirectoryError(f"{run.path} has the same name and seed as {other}")
        if (run.settings.common.dataset, _groups(run)) != (dataset, groups):
            raise RunDirectoryError(
                f"{run.path} is of other data or sites than {runs[0].path}: name runs of the same"
            )


def _groups(run: FinishedRun) -> dict[str, str]:
    return {site: str(facts["distribution"]) for site, facts in sorted(run.silos.items())}


def _cells(
    run: FinishedRun, split: str, wanted_round: int | None, with_own: bool
) -> Iterator[tuple[str, str, str, str, float]]:
    """Yield metric, name of the bar, site, distribution and value.

    Raises:
        SettingError: the round was not measured.
        RunDirectoryError: metrics.csv names a site that silos.json does not.
    """
    rows = [row for row in run.metrics if row["split"] == split]
    measured = sorted({int(row["round"]) for row in rows if not row["metric"].startswith(_OWN)})
    round_ = run.summary["rounds"] if wanted_round is None else wanted_round
    if round_ not in measured:
        raise SettingError(
            f"the run in {run.path} has no {split} figures of round {round_}; it has those of "
            f"{', '.join(map(str, measured)) or 'none'}"
        )
    line, groups = read_run(run, split).line, _groups(run)
    for row in rows:
        own = row["metric"].startswith(_OWN)
        if int(row["round"]) == round_ and row["site"] != ALL and (with_own or not own):
            if row["site"] not in groups:
                site = one_line(row["site"], 60)
                raise RunDirectoryError(
                    f"{run.path / 'metrics.csv'} has figures of site '{site}', which silos.json "
                    "does not name: the run directory was altered"
                )
            name = f"{line}, own" if own else line
            metric = row["metric"].removeprefix(_OWN)
            yield metric, name, row["site"], groups[row["site"]], float(row["value"])


def draw_bars(bars: SiteBars) -> Figure:
    """Return the picture: a panel per metric, sites next to one another, a colour an experiment."""
    table = bars.table
    metrics, names = list(table["metric"].unique()), list(table["experiment"].unique())
    groups = dict(sorted(zip(table["site"], table["distribution"], strict=True)))
    width = 1.2 + len(groups) * max(0.6, 0.17 * len(names) + 0.2)
    figure = new_figure(max(5.0, width), 0.9 + 2.0 * len(metrics))
    panels = figure.subplots(len(metrics), 1, squeeze=False, sharex=True)[:, 0]
    for axes, metric in zip(panels, metrics, strict=True):
        _draw_panel(axes, table[table["metric"] == metric], list(groups), colours(names))
        axes.set_ylabel(CURVES.get(metric, metric))
        for place, (before, after) in enumerate(pairwise(groups.values())):
            if before != after:
                axes.axvline(place + 0.5, color=GREY, linewidth=0.8, linestyle=":")
    _name_groups(panels[0], groups)
    panels[-1].set_xticks(range(len(groups)), list(groups))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=_LEGEND_COLUMNS, fontsize="small"
    )
    figure.suptitle(bars.title, fontsize="medium")
    return figure


def _draw_panel(
    axes: Axes, table: pd.DataFrame, sites: Sequence[str], coloured: Mapping[str, str]
) -> None:
    """Draw one metric: per experiment a bar at each site that has it."""
    each = 0.84 / len(coloured)
    for number, (name, colour) in enumerate(coloured.items()):
        here = table[table["experiment"] == name].set_index("site").reindex(list(sites))
        # Of a single seed there is no deviation to draw
        errors = here["sd"].tolist() if (here["seeds"] > 1).any() else None
        axes.bar(
            [place - 0.42 + (number + 0.5) * each for place in range(len(sites))],
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


def _name_groups(axes: Axes, groups: Mapping[str, str]) -> None:
    """Write each distribution above its sites; sites that are one each need no second name."""
    places: dict[str, list[int]] = {}
    for place, (site, group) in enumerate(groups.items()):
        if group != site:
            places.setdefault(group, []).append(place)
    for group, at in places.items():
        axes.annotate(
            group,
            (sum(at) / len(at), 1),
            xycoords=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize="small",
        )
