"""Reads a run directory again: whether its run has begun and ended, and its results.

``summary.json`` is written last, so a run has ended only if that file exists.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsilo.models.contract.errors import RunDirectoryError, SettingError
from fedsilo.models.contract.one_line import as_word
from fedsilo.server_app.config.settings import RunSettings, read_run_config, resolve_recorded
from fedsilo.server_app.records.run_directory import (
    CONFIG,
    SILOS,
    SUMMARY,
    RunDirectory,
    refuse_links,
)
from fedsilo.server_app.studies.published.numbers import Published, published_numbers

Document = Mapping[str, Any]
Rows = list[dict[str, str]]


def has_begun(path: Path) -> bool:
    """Tell whether a run has begun in a folder."""
    return (path / CONFIG).is_file()


def has_ended(path: Path) -> bool:
    """Tell whether a folder holds a complete run."""
    return RunDirectory(path).has_ended()


@dataclass(frozen=True)
class FinishedRun(RunDirectory):
    """The directory of a finished run; each file is read at its first use.

    Every property raises a ``RunDirectoryError`` if its file is missing or damaged.
    """

    def __post_init__(self) -> None:
        """Refuse links out of the directory, before any file is read."""
        refuse_links(self.path)

    @cached_property
    def summary(self) -> Document:
        """The content of ``summary.json``."""
        summary: Document = self.read_json(SUMMARY)
        return summary

    @cached_property
    def silos(self) -> Document:
        """The content of ``silos.json``: per site its sizes, labels and fingerprints."""
        silos: Document = self.read_json(SILOS)
        return silos

    @cached_property
    def settings(self) -> RunSettings:
        """The settings of the run, but with this user's cache directory."""
        values = read_run_config(self.path / CONFIG).settings
        # Decoded data are written to the cache, so a foreign run directory must not choose it
        values = values | {"cache-dir": ""}
        try:
            return resolve_recorded(values)
        except SettingError as error:
            raise RunDirectoryError(f"{self.path / CONFIG}: {error}") from None

    @cached_property
    def paper(self) -> Published:
        """The numbers of the paper for a run in this setting, or why the paper has none."""
        return published_numbers(read_run_config(self.path / CONFIG).settings, self.silos)

    @cached_property
    def metrics(self) -> Rows:
        """The rows of ``metrics.csv``, as text."""
        return self.read_csv("metrics.csv")

    @cached_property
    def traffic(self) -> Rows:
        """The rows of ``traffic.csv``, as text; earlier versions counted no steps."""
        return [{"steps": "0", "samples": "0", **row} for row in self.read_csv("traffic.csv")]


def same_split(runs: Iterable[FinishedRun]) -> bool | None:
    """Tell whether all runs (one or more) used the same split; None if sites send no digests."""
    splits = [{site: facts["fingerprints"] for site, facts in run.silos.items()} for run in runs]
    told = all(digests for split in splits for digests in split.values())
    return all(split == splits[0] for split in splits) if told else None


def finished_run(path: Path) -> FinishedRun:
    """Open the finished run in a folder.

    Raises:
        RunDirectoryError: the folder does not exist, its run has not ended, or another version of
            fedsilo made it.
    """
    if not path.is_dir():
        raise RunDirectoryError(f"run directory {path} does not exist: name one that does")
    if not has_ended(path):
        raise RunDirectoryError(
            f"the run in {path} has not ended: continue it by 'fedsilo resume {as_word(path)}'"
        )
    if has_begun(path):
        read_run_config(path / CONFIG)  # refuses another format at once, before any file is used
    return FinishedRun(path)
