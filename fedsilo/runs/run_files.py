"""The files of a run directory, each read once, at its first use."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsilo.core.errors import RunDirectoryError, SettingError
from fedsilo.runs.published.published_numbers import Published, published_numbers
from fedsilo.server_app.config.settings import (
    RunConfig,
    RunSettings,
    read_recorded,
    read_run_config,
)
from fedsilo.server_app.records.run_directory import CONFIG, SILOS, SUMMARY, RunDirectory
from fedsilo.server_app.records.shown import Document, Row

# pandas takes a second to import, and a report does not need it
if TYPE_CHECKING:
    import pandas as pd

_METRIC_TYPES = {"round": int, "site": str, "split": str, "metric": str, "value": float}
_TRAFFIC_TYPES = {
    "round": int,
    "phase": str,
    "site": str,
    "bytes_down": int,
    "bytes_up": int,
    "seconds": float,
    "steps": int,
    "samples": int,
}


@dataclass(frozen=True)
class RunFiles:
    """The content of a run directory's files; ``FinishedRun`` adds to it.

    A property that reads a file raises a ``RunDirectoryError`` if the file is missing, is damaged
    or has another format. The error names the file.

    Attributes:
        path: the run directory.
    """

    path: Path

    @cached_property
    def config(self) -> RunConfig:
        """Return the content of ``config.toml``: the settings, the engine and the software.

        The setting 'data.cache-dir' is always empty, because a foreign run directory must not
        decide where files are written.
        """
        config = read_run_config(self.path / CONFIG)
        # Decoded data are written to the cache, so a foreign run directory must not choose it
        return dataclasses.replace(config, settings=config.settings | {"data.cache-dir": ""})

    @cached_property
    def settings(self) -> RunSettings:
        """Return the settings of the run, which can also be read by key: ``settings["rounds"]``.

        The recorded cache folder is replaced by the current user's. Contradictions between settings
        are not checked.

        Raises:
            RunDirectoryError: a setting is invalid.
        """
        try:
            return read_recorded(self.config.settings)
        except SettingError as error:
            raise RunDirectoryError(f"{self.path / CONFIG}: {error}") from None

    @cached_property
    def summary(self) -> Document:
        """``summary.json``: final metrics, seconds, bytes, failures (docs/run-directory.md)."""
        summary: Document = RunDirectory(self.path).read_json(SUMMARY)
        return summary

    @cached_property
    def paper(self) -> Published:
        """The numbers of the paper for a run in this setting, or why the paper has none."""
        return published_numbers(self.config.settings, self.silos)

    @cached_property
    def silos(self) -> Document:
        """``silos.json``: site -> its sizes, label counts, class names and fingerprints."""
        silos: Document = RunDirectory(self.path).read_json(SILOS)
        return silos

    @cached_property
    def metric_rows(self) -> list[Row]:
        """The rows of ``metrics.csv``, as text: round, site, split, metric, value."""
        return RunDirectory(self.path).read_csv("metrics.csv")

    @cached_property
    def traffic_rows(self) -> list[Row]:
        """Return the rows of ``traffic.csv``, as strings.

        If the file lacks the column ``steps`` or ``samples``, each row gets "0" in this column.
        """
        rows = RunDirectory(self.path).read_csv("traffic.csv")
        return [{"steps": "0", "samples": "0", **row} for row in rows]

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """``metrics.csv``: a row per number, ``round, site, split, metric, value``."""
        return metrics_frame(self.metric_rows)

    @cached_property
    def traffic(self) -> pd.DataFrame:
        """``traffic.csv``: a row per message with its bytes, seconds, optimiser steps, samples."""
        return traffic_frame(self.traffic_rows)

    @cached_property
    def sites(self) -> pd.DataFrame:
        """A row per site: ``site, distribution, train, val, test`` (samples) and ``dropped``."""
        return sites_frame(self.silos)

    def last_metrics(self, split: str) -> dict[str, dict[str, float]]:
        """Return the metrics of a split in the last round: site -> metric -> value.

        The last round is the number of rounds in ``summary.json``. A site without any metric in
        this round is left out.
        """
        # The cells are text, so the round is compared as text too
        last = str(self.summary["rounds"])
        values: dict[str, dict[str, float]] = {}
        for row in self.metric_rows:
            if row["round"] == last and row["split"] == split:
                values.setdefault(row["site"], {})[row["metric"]] = float(row["value"])
        return values


def metrics_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Build the table of ``metrics.csv`` from its rows of strings, with the file's columns."""
    return _typed_frame(rows, _METRIC_TYPES)


def traffic_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Build the table of ``traffic.csv`` from its rows of strings, with the file's columns."""
    return _typed_frame(rows, _TRAFFIC_TYPES)


def sites_frame(silos: Document) -> pd.DataFrame:
    """Build a data frame about the sites from the content of silos.json, with a row per site.

    The columns are 'site', 'distribution', one for each split such as 'train', and 'dropped'. The
    column of a split has the number of samples in it. 'dropped' is the number of samples that the
    site left out.
    """
    import pandas as pd

    rows = []
    for site, facts in silos.items():
        row = {"site": site, "distribution": facts["distribution"], **facts["sizes"]}
        rows.append(row | {"dropped": facts["dropped"]})
    return pd.DataFrame(rows)


def _typed_frame(rows: Sequence[Row], types: dict[str, Any]) -> pd.DataFrame:
    """Build a data frame from rows of strings, such as those of a CSV file.

    ``types`` maps each column to its type, in the order of the columns. Values are converted to
    this type. Columns of type ``str`` stay as they are, so that a key that a row lacks stays a
    missing value. Columns that ``types`` does not name are left out.
    """
    import pandas as pd

    frame = pd.DataFrame(rows, columns=list(types))
    # Texts keep the type that pandas gives them: 'str' would turn a missing cell into "nan"
    numbers = {column: kind for column, kind in types.items() if kind is not str}
    return frame.astype(numbers)
