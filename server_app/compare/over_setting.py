"""``fedsilo against``: a figure of finished runs over a setting in which they differ.

Accuracy over the share of unseen labels, for example, as the FedEFM paper compares. A line is an
experiment of ``fedsilo compare``, a point the mean over seeds, its bar their standard deviation.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.contract.errors import RunDirectoryError, SettingError
from models.contract.settings_schema import Value, unknown_key
from models.figures.palette import colours
from server_app.compare.tables import chosen_metrics, figure_of, of_split
from server_app.config.settings import differences, known_defaults, resolve, run_values
from server_app.figures.learning_curves import write_picture
from server_app.records.run_directory import RunDirectory
from server_app.run.progress_bars import make_console

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SEED = re.compile(r"-(seed|split)\d+$")  # as `fedsilo compare` names runs
_DRAWN = ("seed", "fold-seed")  # settings in which the runs of one point may differ
_MARKERS = "osD^vP*X<>"

Lines = Mapping[str, Mapping[float, Sequence[float]]]  # experiment -> setting -> figure per seed


@dataclass(frozen=True)
class Finished:
    """A finished run: where it lies, its settings, and its summary of the split."""

    path: Path
    settings: Mapping[str, Value]
    summary: Mapping[str, Any]

    @property
    def line(self) -> str:
        """The experiment that it is a run of."""
        return _SEED.sub("", self.path.resolve().name)


def against(options: argparse.Namespace) -> None:
    """Print and draw the figure over the setting.

    Raises:
        SettingError: the setting is none, or no number, or the metric is in no run.
        RunDirectoryError: a folder holds no finished run, or runs of one line differ otherwise.
    """
    runs = [read_run(path, options.split) for path in run_folders(options.folders)]
    metric = chosen_metrics(options.metric, [run.summary for run in runs], "--metric")[0]
    found = lines(runs, options.setting, metric)
    console = make_console()
    for name, points in found.items():
        told = ", ".join(f"{_cell(values)} at {value:g}" for value, values in points.items())
        console.print(f"{name}: {told}", highlight=False, soft_wrap=True)
    label = f"{options.split} {metric}"
    write_picture(options.picture, draw_lines(found, options.setting, label))
    console.print(f"drawn: {options.picture}", highlight=False, soft_wrap=True)


def run_folders(folders: Sequence[Path]) -> list[Path]:
    """Return the run directories among ``folders`` and directly below them, each once.

    Raises:
        RunDirectoryError: there is none in one of them, or one that has not ended.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        inside = sorted(folder.iterdir()) if folder.is_dir() else []
        runs = [path for path in (folder, *inside) if (path / "config.toml").is_file()]
        if not runs:
            raise RunDirectoryError(f"{folder} is no run directory and holds none")
        for run in runs:
            if not (run / "summary.json").is_file():
                raise RunDirectoryError(f"the run in {run} has not ended: 'fedsilo resume {run}'")
            found.setdefault(run.resolve(), run)
    return list(found.values())


def read_run(path: Path, split: str) -> Finished:
    """Return a finished run with its figures of ``split``."""
    settings = resolve(run_values(path / "config.toml"))
    summary = of_split(RunDirectory(path).read_json("summary.json"), split)
    return Finished(path, settings.decisive(), summary)


def lines(runs: Sequence[Finished], setting: str, metric: str) -> Lines:
    """Return the figures of all sites by experiment and value of ``setting``, in their order.

    Raises:
        SettingError: ``setting`` is none of these runs' or no number.
        RunDirectoryError: two runs of an experiment differ in more, or are the same run twice.
    """
    found: dict[str, dict[float, dict[tuple[Value, ...], float]]] = {}
    first: dict[str, Finished] = {}
    for run in runs:
        value = _number(run, setting)
        _refuse_others(first.setdefault(run.line, run), run, setting)
        figure = figure_of(run.summary, "all", metric)
        point = found.setdefault(run.line, {}).setdefault(value, {})
        drawn = tuple(run.settings[key] for key in _DRAWN)
        if drawn in point:
            raise RunDirectoryError(
                f"{run.path}: another run of '{run.line}' has the same seed and {setting} {value:g}"
            )
        if figure is not None:
            point[drawn] = figure
    return {
        name: {value: list(points[value].values()) for value in sorted(points) if points[value]}
        for name, points in found.items()
    }


def draw_lines(found: Lines, setting: str, label: str) -> Figure:
    """Return the picture: a line per experiment, mean and standard deviation over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    axes = figure.subplots()
    for number, (name, colour) in enumerate(colours(list(found)).items()):
        points = found[name]
        axes.errorbar(
            list(points),
            [statistics.mean(values) for values in points.values()],
            [_sd(values) for values in points.values()],
            label=name,
            color=colour,
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=5,
            capsize=3,
        )
    axes.set_xlabel(setting)
    axes.set_ylabel(f"{label}, mean and sd over seeds")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _number(run: Finished, setting: str) -> float:
    if setting not in run.settings and setting in known_defaults():
        raise SettingError(f"setting '{setting}' is none of the run in {run.path}: leave it out")
    if setting not in run.settings:
        raise unknown_key(setting, run.settings)
    value = run.settings[setting]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(f"setting '{setting}' is {value!r} in {run.path}: no number to draw by")
    return float(value)


def _refuse_others(first: Finished, run: Finished, setting: str) -> None:
    free = {setting, *_DRAWN}
    before, now = (
        {key: value for key, value in one.settings.items() if key not in free}
        for one in (first, run)
    )
    if told := differences(before, now):
        raise RunDirectoryError(
            f"{run.path} is no run of the same experiment as {first.path}: {told}"
        )


def _sd(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _cell(values: Sequence[float]) -> str:
    spread = f" ± {_sd(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"
