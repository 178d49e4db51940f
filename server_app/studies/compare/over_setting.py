"""``fedsilo sweep``: a metric of finished runs over a setting in which they differ.

Accuracy over the share of unseen labels, for example, as the FedEFM paper compares. A line is an
experiment of ``fedsilo compare``, a point the mean over seeds, its bar their standard deviation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedsilo.models.contract.errors import RunDirectoryError, SettingError
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import Value, keys_with, unknown_key
from fedsilo.models.figures.palette import line_styles
from fedsilo.server_app.config.settings import differences, known_defaults
from fedsilo.server_app.studies.compare.results import chosen_metrics, figure_of, of_split
from fedsilo.server_app.studies.compare.tables import deviation, mean, spread_cell
from fedsilo.server_app.studies.figures.learning_curves import write_picture
from fedsilo.server_app.studies.figures.panels import new_figure
from fedsilo.server_app.studies.finished_run import FinishedRun, finished_run, has_begun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SEED = re.compile(r"-(seed|split)\d+$")  # as `fedsilo compare` names runs
_SEEDS = keys_with(CommonSettings, "seed")  # settings in which the runs of one point may differ


@dataclass(frozen=True)
class SweptRun:
    """A finished run: its path, what decides its result, and its summary of the split."""

    path: Path
    settings: Mapping[str, Value]
    summary: Mapping[str, Any]

    @property
    def line(self) -> str:
        """The experiment that it is a run of."""
        return _SEED.sub("", self.path.resolve().name)


@dataclass(frozen=True)
class Sweep:
    """Figures of all sites over a setting.

    ``points`` has a row per experiment and value of the setting: ``experiment``, ``value``,
    ``mean``, ``sd`` and ``seeds``; values ascend within an experiment.
    """

    setting: str
    label: str
    experiments: Sequence[str]
    points: pd.DataFrame

    def points_of(self, experiment: str) -> list[Any]:
        """Return an experiment's points."""
        return list(self.points[self.points["experiment"] == experiment].itertuples())

    def lines(self) -> Iterator[str]:
        """Yield a line per experiment with its points."""
        for name in self.experiments:
            texts = (f"{spread_cell(at)} at {at.value:g}" for at in self.points_of(name))
            yield f"{name}: {', '.join(texts)}"

    def draw(self, path: Path) -> None:
        """Draw the points as PNG."""
        write_picture(path, draw_sweep(self))


def sweep(setting: str, folders: Sequence[Path], *, metric: str, split: str) -> Sweep:
    """Return a metric of finished runs over a setting; of several that fit a pattern the first.

    Raises:
        SettingError: the setting does not exist or is not a number, or no run has the metric.
        RunDirectoryError: a folder has no finished run, or runs of one line differ otherwise.
    """
    runs = [read_run(run, split) for run in finished_runs(folders)]
    chosen = chosen_metrics(metric, [run.summary for run in runs], "--metric")[0]
    experiments = list(dict.fromkeys(run.line for run in runs))
    return Sweep(setting, f"{split} {chosen}", experiments, sweep_points(runs, setting, chosen))


def finished_runs(folders: Sequence[Path]) -> list[FinishedRun]:
    """Return the runs in ``folders`` and directly below them, each once.

    Raises:
        RunDirectoryError: there is none in one of them, or one that has not ended.
    """
    runs: dict[Path, FinishedRun] = {}
    for folder in folders:
        inside = sorted(folder.iterdir()) if folder.is_dir() else []
        begun = [path for path in (folder, *inside) if has_begun(path)]
        if not begun:
            raise RunDirectoryError(f"{folder} is not a run directory and has none")
        for path in begun:
            runs.setdefault(path.resolve(), finished_run(path))
    return list(runs.values())


def read_run(run: FinishedRun, split: str) -> SweptRun:
    """Return a finished run with its figures of ``split``."""
    return SweptRun(run.path, run.settings.decisive(), of_split(run.summary, split))


def sweep_points(runs: Sequence[SweptRun], setting: str, metric: str) -> pd.DataFrame:
    """Return the points of a sweep, those of undefined figures left out.

    Raises:
        SettingError: ``setting`` is not one of these runs' settings, or not a number.
        RunDirectoryError: two runs of an experiment differ in more, or are the same run twice.
    """
    seen: set[tuple[Any, ...]] = set()
    first: dict[str, SweptRun] = {}
    records = []
    for run in runs:
        value = _number(run, setting)
        refuse_other_settings(first.setdefault(run.line, run), run, setting)
        identity = (run.line, value, *(run.settings[key] for key in _SEEDS))
        if identity in seen:
            raise RunDirectoryError(
                f"{run.path}: another run of '{run.line}' has the same seed and {setting} {value:g}"
            )
        seen.add(identity)
        records.append((run.line, value, figure_of(run.summary, "all", metric)))
    figures = pd.DataFrame(records, columns=["experiment", "value", "figure"])
    ascending = figures.dropna(subset="figure").sort_values("value", kind="stable")
    grouped = ascending.groupby(["experiment", "value"], sort=False)["figure"]
    return grouped.agg(mean=mean, sd=deviation, seeds="size").reset_index()


def draw_sweep(swept: Sweep) -> Figure:
    """Return the picture: a line per experiment, mean and standard deviation over seeds."""
    figure = new_figure(8.4, 4.6)
    axes = figure.subplots()
    styles = line_styles(swept.experiments)
    for name in swept.experiments:
        points = swept.points_of(name)
        x, y, sd = ([getattr(point, key) for point in points] for key in ("value", "mean", "sd"))
        style = styles[name].options()
        axes.errorbar(x, y, sd, label=name, markersize=5, capsize=3, **style)
    axes.set_xlabel(swept.setting)
    axes.set_ylabel(f"{swept.label}, mean and sd over seeds")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _number(run: SweptRun, setting: str) -> float:
    if setting not in run.settings and setting in known_defaults():
        raise SettingError(f"setting '{setting}' is not of the run in {run.path}: leave it out")
    if setting not in run.settings:
        raise unknown_key(setting, run.settings)
    value = run.settings[setting]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(f"setting '{setting}' is {value!r} in {run.path}: it must be a number")
    return float(value)


def refuse_other_settings(first: SweptRun, run: SweptRun, *free_settings: str) -> None:
    """Refuse runs of one name that differ in more than their seeds and what is free.

    Raises:
        RunDirectoryError: they do.
    """
    free = dict.fromkeys((*free_settings, *_SEEDS), "")
    if other := differences({**first.settings, **free}, {**run.settings, **free}):
        raise RunDirectoryError(
            f"{run.path} is not a run of the same experiment as {first.path}: {other}"
        )
