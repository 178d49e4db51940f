"""The finished runs of a report: the name of each, and which of them are one experiment."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsilo.core.errors import RunDirectoryError
from fedsilo.core.one_line import format_count
from fedsilo.core.settings.common_settings import SERVER
from fedsilo.pages.number_texts import hide_small_count
from fedsilo.runs.finished_run import FinishedRun, Shown
from fedsilo.server_app.records.run_directory import CONFIG

_SEEDS = ("seed", "split.fold-seed")
_SPLIT_NAMES = {"train": "training", "val": "validation", "test": "test"}
_MANY_CLASSES = 8  # a table of more columns cannot be read


def reported_runs(folders: Sequence[Path]) -> list[Shown]:
    """Open the runs in ``folders`` and directly below them, each once, as pages may show them.

    Each run gets a name that is unique on the page, with no more of its path than that needs. Runs
    that differ only in their seed share an experiment.

    Raises:
        RunDirectoryError: a folder has no run, or a run has not ended.
    """
    runs: dict[Path, FinishedRun] = {}
    for folder in folders:
        for path in _run_directories(folder):
            place = path.resolve()
            if place not in runs:  # a run may be in two folders, or named by a link
                runs[place] = FinishedRun.open(path)
    # A single run needs no path to be distinguished from others
    if len(runs) == 1:
        return [run.shown() for run in runs.values()]
    same_name: dict[str, list[FinishedRun]] = {}
    for run in runs.values():
        same_name.setdefault(run.experiment, []).append(run)
    shown = []
    for name, run in zip(_unique_names(list(runs)), runs.values(), strict=True):
        # Runs of one name with other settings are experiments of their own
        experiment = name
        if _differ_by_seed(same_name[run.experiment]):
            experiment = run.experiment
        shown.append(run.shown(name, experiment))
    return shown


def _run_directories(folder: Path) -> list[Path]:
    """Return the folder and those directly in it that are run directories, at least one."""
    candidates = [folder]
    if folder.is_dir():
        candidates += sorted(folder.iterdir())
    found = [path for path in candidates if (path / CONFIG).is_file()]
    if not found:
        raise RunDirectoryError(
            f"{folder} is no run directory and has none in it: name another folder"
        )
    return found


def experiments_of(runs: Sequence[Shown]) -> dict[str, dict[int, Shown]]:
    """Return experiment -> seed -> run."""
    experiments: dict[str, dict[int, Shown]] = {}
    for run in runs:
        experiments.setdefault(run.experiment, {})[run.summary["seed"]] = run
    return experiments


def _unique_names(paths: Sequence[Path]) -> list[str]:
    """Return the folders' names, with as many parents as make them unique."""
    for depth in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _differ_by_seed(runs: Sequence[FinishedRun]) -> bool:
    """Tell whether runs of one name have the same settings except for a seed that occurs once."""
    seeds = {run.summary["seed"] for run in runs}
    if len(seeds) < len(runs):
        return False
    first = _settings_without_seeds(runs[0])
    return all(_settings_without_seeds(run) == first for run in runs)


def _settings_without_seeds(run: FinishedRun) -> dict[str, Any]:
    settings: dict[str, Any] = dict(run.settings.decisive())
    for key in _SEEDS:
        settings.pop(key, None)
    return settings


def taking_part(run: Shown) -> dict[str, Any]:
    """Build the template variables of ``sites.html`` for a run."""
    splits, columns = [], []
    for split in _SPLIT_NAMES:
        if any(facts["sizes"].get(split) for facts in run.silos.values()):
            splits.append(split)
            columns.append(_SPLIT_NAMES[split])
    # Sites report how many samples they left out only at this level of trust
    reports_dropped = run.trust == SERVER
    if reports_dropped:
        columns.append("left out")
    sizes, by_class = [], []
    for site, facts in run.silos.items():
        if splits:
            sizes.append([site, *_sample_cells(run, facts, splits, reports_dropped)])
        counts = facts["label_counts"].get("test")
        if counts and "test" in splits and len(run.class_names()) <= _MANY_CLASSES:
            by_class.append([site, *(hide_small_count(count, run.floor) for count in counts)])
    failed = []
    for failure in run.summary["failures"]:
        round_ = str(failure["round"])
        failed.append([round_, failure["phase"], failure["site"], failure["reason"]])
    return {
        "name": run.name,
        "site_count": format_count(len(run.silos), "site"),
        "simulated": run.is_simulated,
        "noun": run.noun(2),
        "floor": run.floor,
        "splits": columns,
        "sizes": sizes,
        "class_names": run.class_names(),
        "by_class": by_class,
        "stopped": run.summary["stopped"],
        "failed": failed,
    }


def _sample_cells(
    run: Shown, facts: Mapping[str, Any], splits: Sequence[str], reports_dropped: bool
) -> list[str]:
    """Return a site's number of samples in each split as text, small ones hidden."""
    cells = [hide_small_count(facts["sizes"].get(split), run.floor) for split in splits]
    if reports_dropped:
        cells.append(hide_small_count(facts["dropped"], run.floor))
    return cells
