"""Reads the metrics of runs, finished or not, as pages may show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedsilo.core.errors import FedsiloError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.site_facts import SPLITS
from fedsilo.datasets.registry import DATA_SETS, shown_metrics
from fedsilo.pages.page import Picture, share
from fedsilo.reports.watch.live_curves import Line, draw_pictures, mean_by_round
from fedsilo.runs.finished_run import FinishedRun
from fedsilo.server_app.records.run_directory import CONFIG, SILOS
from fedsilo.server_app.records.shown import Floors, Row

# The metrics of a plugin's data set, because its code is not imported only to show a table
_METRICS = ("accuracy", "balanced-accuracy", "auc", "loss")
_METRIC_FILE, _TRAFFIC_FILE = "metrics.csv", "traffic.csv"
_FILES = (CONFIG, SILOS, _METRIC_FILE, _TRAFFIC_FILE)


@dataclass(frozen=True)
class Measured:
    """The metrics and messages of a run so far, without metrics that no page may show.

    Attributes:
        rows: the rows of metrics.csv that may be shown (``records.shown`` has the rules).
        answers: the rows of traffic.csv, without those of the hello.
        headline: the metrics of the run's tables, the most important one first.
    """

    rows: Sequence[Row]
    answers: Sequence[Row]
    headline: Sequence[str]

    @cached_property
    def split(self) -> str:
        """The split that tables show: ``test``, or ``val`` if no site measured test samples."""
        if any(row["split"] == "test" for row in self.rows):
            return "test"
        return "val"

    @cached_property
    def metrics(self) -> list[str]:
        """The headline metrics that some site has measured, in their order."""
        measured = {row["metric"] for row in self.rows if row["split"] == self.split}
        return [metric for metric in self.headline if metric in measured]

    @cached_property
    def last_round(self) -> int:
        """The last round with a measurement in ``split``; 0 without measurements."""
        return max(
            (int(row["round"]) for row in self.rows if row["split"] == self.split), default=0
        )

    @cached_property
    def pictures(self) -> list[Picture]:
        """The curves of the run; drawn once."""
        return draw_pictures(self.rows, self.answers, next(iter(self.metrics), "accuracy"))

    def line(self, metric: str) -> Line:
        """Return round -> mean of a metric over the sites that have it, in ``split``."""
        return mean_by_round(self.rows, self.split, metric)

    def last_of_sites(self, metric: str) -> dict[str, float]:
        """Return each site's value of a metric in the last round.

        The split is test, or val if no site measured test samples. The last round is the latest
        with any metric of that split.

        Returns:
            Site -> value. Sites without ``metric`` in the last round are left out.
        """
        values = {}
        for row in self.rows:
            is_last = int(row["round"]) == self.last_round
            if is_last and row["split"] == self.split and row["metric"] == metric:
                values[row["site"]] = float(row["value"])
        return values

    def last_mean(self, metric: str) -> float | None:
        """Return the unweighted mean of ``last_of_sites``, or None without a value."""
        values = self.last_of_sites(metric).values()
        if not values:
            return None
        return sum(values) / len(values)

    def summary(self) -> str:
        """Format the first headline metric, such as ``test accuracy 0.912``; empty without one."""
        for metric in self.metrics[:1]:
            return f"{self.split} {metric} {share(self.last_mean(metric))}"
        return ""


class MeasuredRuns:
    """Reads the metrics of runs, and reads a run again only after its files have changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], Measured]] = {}
        self._faults: dict[Path, str] = {}

    def is_known(self, run_dir: Path) -> bool:
        """Tell whether ``read`` can answer from memory, because no file has changed."""
        known = self._known.get(run_dir)
        return known is not None and known[0] == _times_written(run_dir)

    def read(self, run_dir: Path) -> Measured | None:
        """Return the metrics and messages of a run so far, cached while its files are unchanged.

        If a file is missing, damaged or just being written, the result of the last successful call
        is returned. ``fault`` then returns the error. If no call has succeeded yet, for example
        before the end of the first round, the result is None.
        """
        known = self._known.get(run_dir)
        # Taken before the files are read, so a file that changes meanwhile is read again next time
        written = _times_written(run_dir)
        if known is not None and known[0] == written:
            return known[1]
        try:
            found = _read_measured(run_dir)
        except (FedsiloError, OSError, ValueError) as error:
            self._faults[run_dir] = str(error)
            return known[1] if known else None
        self._known[run_dir] = (written, found)
        self._faults.pop(run_dir, None)
        return found

    def fault(self, run_dir: Path) -> str:
        """Return the error of the last ``read`` of a run; empty if it succeeded."""
        return self._faults.get(run_dir, "")


def _times_written(run_dir: Path) -> tuple[int, ...]:
    """Return when each of a run's files was last written, so that a caller can notice changes.

    The files are config.toml, silos.json, metrics.csv and traffic.csv, in this order. The times are
    in nanoseconds. A missing file has time 0.
    """
    times = []
    for name in _FILES:
        try:
            times.append((run_dir / name).stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(times)


def _read_measured(run_dir: Path) -> Measured:
    """Read the metrics and messages of a run so far, without metrics that no page may show.

    Metrics are hidden if they rest on too few patients. Messages, the rows of traffic.csv, are
    returned without those of the phase "hello", in which sites introduce themselves.

    Raises:
        RunDirectoryError: a file is missing, damaged or of another version.
    """
    run = FinishedRun(run_dir)
    rows = run.metric_rows
    last = max((int(row["round"]) for row in rows), default=0)
    metrics = {split: _values_of_round(rows, last, split) for split in SPLITS}
    floors = Floors(run.settings.common, run.silos, last, metrics)
    answers = [row for row in run.traffic_rows if row["phase"] != "hello"]
    return Measured(floors.shown_rows(rows), answers, _headline(run.settings.common))


def _values_of_round(rows: Sequence[Row], at: int, split: str) -> dict[str, dict[str, float]]:
    """Collect the metrics of a split, such as "test", in round ``at``.

    Returns:
        Site -> metric -> value. Sites without a metric of that split in that round are left out.
    """
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        if int(row["round"]) == at and row["split"] == split:
            values.setdefault(row["site"], {})[row["metric"]] = float(row["value"])
    return values


def _headline(settings: CommonSettings) -> Sequence[str]:
    """Return the metrics of a run's tables, the most important one first."""
    if settings.dataset in DATA_SETS:
        return shown_metrics(settings.dataset, settings.task)
    return _METRICS
