"""The finished runs of a report: by what name each goes, and which are of one experiment."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsilo.core.errors import RunDirectoryError
from fedsilo.core.one_line import counted
from fedsilo.core.settings.common_settings import SERVER
from fedsilo.pages.number_texts import hide_small_count
from fedsilo.runs.finished_run import FinishedRun, Shown
from fedsilo.server_app.records.run_directory import CONFIG

_SEEDS = ("seed", "split.fold-seed")


def reported_runs(folders: Sequence[Path]) -> list[Shown]:
    """Open the runs in ``folders`` and directly below them, each once, without what is not shown.

    Each has a name that is unique on its page, and no part of its place's path that is not needed
    for that. Runs that differ only in their seed share an experiment.

    Raises:
        RunDirectoryError: there is none in one of them, or one that has not ended.
    """
    runs: dict[Path, FinishedRun] = {}
    for folder in folders:
        inside = sorted(folder.iterdir()) if folder.is_dir() else []
        begun = [path for path in (folder, *inside) if (path / CONFIG).is_file()]
        if not begun:
            raise RunDirectoryError(
                f"{folder} is no run directory and has none in it: name another folder"
            )
        for path in begun:
            if path.resolve() not in runs:
                runs[path.resolve()] = FinishedRun.open(path)
    if len(runs) == 1:
        return [run.shown() for run in runs.values()]
    alike: dict[str, list[FinishedRun]] = {}
    for run in runs.values():
        alike.setdefault(run.experiment, []).append(run)
    shown = []
    for name, run in zip(_names(list(runs)), runs.values(), strict=True):
        together = _differ_by_seed(alike[run.experiment])
        shown.append(run.shown(name, run.experiment if together else name))
    return shown


def experiments_of(runs: Sequence[Shown]) -> dict[str, dict[int, Shown]]:
    """Return experiment -> seed -> run."""
    found: dict[str, dict[int, Shown]] = {}
    for run in runs:
        found.setdefault(run.experiment, {})[run.summary["seed"]] = run
    return found


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the folders' names, with as many parents as make them unique."""
    for depth in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _differ_by_seed(runs: Sequence[FinishedRun]) -> bool:
    """Tell whether runs of one name are one experiment: other settings alike, each seed once."""
    without = []
    for run in runs:
        decisive = run.settings.decisive()
        without.append({key: value for key, value in decisive.items() if key not in _SEEDS})
    seeds = {run.summary["seed"] for run in runs}
    return len(seeds) == len(runs) and all(settings == without[0] for settings in without)


_SPLIT_NAMES = {"train": "training", "val": "validation", "test": "test"}
_MANY_CLASSES = 8  # a table of more columns cannot be read


def taking_part(run: Shown) -> dict[str, Any]:
    """Build the template variables of ``sites.html`` for a run."""
    silos, failed, floor = run.silos, run.summary["failures"], run.floor
    names = run.class_names()
    splits = [s for s in _SPLIT_NAMES if any(facts["sizes"].get(s) for facts in silos.values())]
    told = run.trust == SERVER  # how many were left out
    return {
        "name": run.name,
        "site_count": counted(len(silos), "site"),
        "simulated": run.is_simulated,
        "noun": run.noun(2),
        "floor": floor,
        "splits": [*(_SPLIT_NAMES[split] for split in splits), *(["left out"] if told else [])],
        "sizes": [
            [
                site,
                *(hide_small_count(facts["sizes"].get(split), floor) for split in splits),
                *([hide_small_count(facts["dropped"], floor)] if told else []),
            ]
            for site, facts in silos.items()
            if splits
        ],
        "class_names": names,
        "by_class": [
            [site, *(hide_small_count(count, floor) for count in counts)]
            for site, facts in silos.items()
            if "test" in splits
            and len(names) <= _MANY_CLASSES
            and (counts := facts["label_counts"].get("test"))
        ],
        "stopped": run.summary["stopped"],
        "failed": [[str(f["round"]), f["phase"], f["site"], f["reason"]] for f in failed],
    }
