"""Finished runs by the experiment that they are of, as ``fedsilo compare`` names them."""

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
    """A finished run: its path, the settings that decide its result, and its summary of a split."""

    path: Path
    settings: Mapping[str, Value]
    summary: Mapping[str, Any]

    @property
    def experiment(self) -> str:
        """The name of its experiment: that of its folder without the seed."""
        return _SEED.sub("", self.path.resolve().name)


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


def read_run(run: FinishedRun, split: str) -> ExperimentRun:
    """Return a finished run with its figures of ``split``."""
    return ExperimentRun(run.path, run.settings.decisive(), of_split(run.summary, split))
