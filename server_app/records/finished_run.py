"""A run directory read again: whether its run has begun and ended, and what it found.

``summary.json`` is written last, so a run has ended exactly when that file is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsilo.models.contract.errors import RunDirectoryError
from fedsilo.server_app.config.settings import RunSettings, refuse_other_format, resolve, run_values
from fedsilo.server_app.records.run_directory import RunDirectory

_CONFIG, _SUMMARY = "config.toml", "summary.json"


def has_begun(path: Path) -> bool:
    """Tell whether a run has begun in a folder."""
    return (path / _CONFIG).is_file()


def has_ended(path: Path) -> bool:
    """Tell whether a whole run lies in a folder."""
    return (path / _SUMMARY).is_file()


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended; each file is read when it is first asked for.

    Every property raises a ``RunDirectoryError`` where its file is missing or damaged.
    """

    directory: RunDirectory

    @property
    def path(self) -> Path:
        """Where the run lies."""
        return self.directory.path

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """The content of ``summary.json``."""
        summary: Mapping[str, Any] = self.directory.read_json(_SUMMARY)
        return summary

    @cached_property
    def silos(self) -> Mapping[str, Any]:
        """The content of ``silos.json``: per site its sizes, labels and fingerprints."""
        silos: Mapping[str, Any] = self.directory.read_json("silos.json")
        return silos

    @cached_property
    def settings(self) -> RunSettings:
        """The settings with which it was run."""
        return resolve(run_values(self.path / _CONFIG))

    @cached_property
    def metrics(self) -> list[dict[str, str]]:
        """The rows of ``metrics.csv``, as text."""
        return self.directory.read_csv("metrics.csv")

    @cached_property
    def traffic(self) -> list[dict[str, str]]:
        """The rows of ``traffic.csv``, as text."""
        return self.directory.read_csv("traffic.csv")


def finished_run(path: Path) -> FinishedRun:
    """Return the run of a folder.

    Raises:
        RunDirectoryError: it has not ended, or another version of fedsilo made it.
    """
    if not has_ended(path):
        raise RunDirectoryError(f"the run in {path} has not ended: 'fedsilo resume {path}'")
    refuse_other_format(path / _CONFIG)
    return FinishedRun(RunDirectory(path))
