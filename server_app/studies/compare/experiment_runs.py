"""Finds finished runs, and their experiments by the names that ``fedsilo compare`` gives."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.studies.compare.results import of_split
from fedsilo.server_app.studies.finished_run import FinishedRun, finished_run, has_begun

_SEED = re.compile(r"-(seed|split)\d+$")  # as `fedsilo compare` names runs


@dataclass(frozen=True)
class ExperimentRun:
    """A finished run: its path, its decisive settings, and its summary for one split."""

    path: Path
    settings: Mapping[str, Value]
    summary: Mapping[str, Any]

    @property
    def experiment(self) -> str:
        """The name of its experiment: the name of its folder without the seed."""
        return _SEED.sub("", self.path.resolve().name)


def finished_runs(folders: Sequence[Path]) -> list[FinishedRun]:
    """Find the runs in ``folders`` and directly below them, each once.

    Raises:
        RunDirectoryError: a folder has no run, or a run that has not ended.
    """
    runs: dict[Path, FinishedRun] = {}
    for folder in folders:
        inside = sorted(folder.iterdir()) if folder.is_dir() else []
        begun = [path for path in (folder, *inside) if has_begun(path)]
        if not begun:
            raise RunDirectoryError(
                f"{folder} is no run directory and has none in it: name another folder"
            )
        for path in begun:
            runs.setdefault(path.resolve(), finished_run(path))
    return list(runs.values())


def read_run(run: FinishedRun, split: str) -> ExperimentRun:
    """Read a finished run with its metrics on ``split``."""
    return ExperimentRun(run.path, run.settings.decisive(), of_split(run.summary, split))
