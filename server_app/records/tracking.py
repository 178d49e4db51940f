"""Metrics where people look: rows of ``metrics.csv`` and ``traffic.csv`` in TensorBoard or MLflow.

Each row becomes one scalar at its round: ``<split>/<metric>/<site>``, and of a message
``traffic/<phase>/<bytes_down, bytes_up or seconds>/<site>``. The hook comes after the checkpoint's
and keeps nothing in it, so that a run is the same with and without. A resumed run tells all rows of
its checkpoint again where what stood there is taken back by ``purge_step`` (TensorBoard), and what
was not yet told where it cannot be (MLflow). A failure is told in one line and ends no run.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedsilo.server_app.records.recorders import TRAFFIC_HEADER, MetricsHook, TrafficHook
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.state import State
from fedsilo.strategies.meeting.participants import Participants

_AT_ONCE = 1000  # metrics that MLflow takes in a request
_NOT_IN_A_KEY = re.compile(r"[^\w\-. /:]")
_EXPERIMENT, _TAG = "fedsilo", "fedsilo.run-directory"
# A server that is away may cost a run seconds, not minutes; who sets them has the last word
_IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


@dataclass(frozen=True)
class Scalar:
    """A row as a number under a name, at a round."""

    tag: str
    step: int
    value: float


class Tracker(Protocol):
    """Where scalars go."""

    def write(self, scalars: Sequence[Scalar]) -> None:
        """Take scalars, in their order."""
        ...

    def close(self) -> None:
        """Take note that no more come."""
        ...


class TensorBoard:
    """Event files in ``<run-dir>/tensorboard``, numbers with all their digits."""

    def __init__(self, run_dir: Path, resumed: bool) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A new run says so too: readers take only a second start for a restart
        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=0)

    def write(self, scalars: Sequence[Scalar]) -> None:
        """Add them and flush."""
        for scalar in scalars:
            self._writer.add_scalar(
                scalar.tag, scalar.value, scalar.step, new_style=True, double_precision=True
            )
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class MLflow:
    """A run of the experiment ``fedsilo`` at ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` beside it.

    A resumed run goes on in the MLflow run that has its directory as a tag.
    """

    def __init__(self, run_dir: Path, resumed: bool) -> None:
        for name, value in _IMPATIENT.items():
            os.environ.setdefault(name, value)
        import mlflow

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run_dir.parent / 'mlflow.db'}"
        self._told: Counter[tuple[str, int]] = Counter()
        with _alone(run_dir.parent / ".mlflow.lock"):  # of two each would make the tables
            self._client = mlflow.MlflowClient(uri)
            found = self._client.get_experiment_by_name(_EXPERIMENT)
            place = found.experiment_id if found else self._client.create_experiment(_EXPERIMENT)
        self._run = (self._known(place, run_dir) if resumed else "") or self._made(place, run_dir)

    def write(self, scalars: Sequence[Scalar]) -> None:
        """Log those that it does not have yet."""
        from mlflow.entities import Metric

        fresh = []
        for scalar in scalars:
            key = _NOT_IN_A_KEY.sub("_", scalar.tag)
            if self._told[key, scalar.step]:
                self._told[key, scalar.step] -= 1
            else:
                fresh.append(Metric(key, scalar.value, 0, scalar.step))
        for start in range(0, len(fresh), _AT_ONCE):
            self._client.log_batch(self._run, metrics=fresh[start : start + _AT_ONCE])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)

    def _known(self, experiment: str, run_dir: Path) -> str:
        """Return the id of the run's MLflow run, and take note of what was told; empty: none."""
        named = f"tags.`{_TAG}` = '{run_dir}'"
        for run in self._client.search_runs([experiment], named, max_results=1):
            for key in run.data.metrics:
                history = self._client.get_metric_history(run.info.run_id, key)
                self._told.update((key, metric.step) for metric in history)
            return str(run.info.run_id)
        return ""

    def _made(self, experiment: str, run_dir: Path) -> str:
        tags = {_TAG: str(run_dir)}
        made = self._client.create_run(experiment, run_name=run_dir.name, tags=tags)
        return str(made.info.run_id)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process is here, by a lock on a file."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


TRACKERS: Mapping[str, Callable[[Path, bool], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
}


class TrackingHook(Hook):
    """Tells a tracker what the metrics and traffic hooks have come to hold."""

    def __init__(
        self, track: str, run_dir: Path, metrics: MetricsHook, traffic: TrafficHook, resumed: bool
    ) -> None:
        self.track = track
        self.run_dir = run_dir
        self.metrics = metrics
        self.traffic = traffic
        self.resumed = resumed
        self.tracker: Tracker | None = None

    def run_started(self, state: State, participants: Participants, total_rounds: int) -> None:
        """Open the tracker; tell what a checkpoint knows."""
        self._try(self._open)
        self._try(self._tell_known)

    def round_ended(self, state: State) -> None:
        """Tell what the round has brought."""
        self._try(self._tell_new)

    def run_ended(self, state: State) -> None:
        """Tell what the final evaluation has brought, and close the tracker."""
        self._try(self._tell_new)
        self._try(self._close)

    def _open(self) -> None:
        if opener := TRACKERS.get(self.track):
            self.tracker = opener(self.run_dir, self.resumed)

    def _tell_known(self) -> None:
        self.metrics.taken(), self.traffic.taken()  # they are among the known
        if self.tracker:
            known = [*_of_metrics(self.metrics.known()), *_of_traffic(self.traffic.known())]
            self.tracker.write(known)

    def _tell_new(self) -> None:
        """Tell the rows that are new; they are taken even where nobody is told."""
        metrics, traffic = self.metrics.taken(), self.traffic.taken()
        if self.tracker:
            self.tracker.write([*_of_metrics(metrics), *_of_traffic(traffic)])

    def _close(self) -> None:
        if self.tracker:
            self.tracker.close()

    def _try(self, step: Callable[[], None]) -> None:
        """Take a step; if it fails, say so and take no more."""
        try:
            step()
        except Exception as error:  # whatever a library and its server can do
            self.tracker = None
            logging.getLogger("flwr").warning(
                "tracking by %s ends, and the run goes on: %s", self.track, _why(error, self.track)
            )


def _of_metrics(rows: Iterable[Sequence[Any]]) -> Iterator[Scalar]:
    for round_, site, split, metric, value in rows:
        yield Scalar(f"{split}/{metric}/{site}", int(round_), float(value))


def _of_traffic(rows: Iterable[Sequence[Any]]) -> Iterator[Scalar]:
    for round_, phase, site, *values in rows:
        for name, value in zip(TRAFFIC_HEADER[3:], values, strict=True):
            yield Scalar(f"traffic/{phase}/{name}/{site}", int(round_), float(value))


def _why(error: Exception, track: str) -> str:
    if isinstance(error, ImportError):
        return f"{track} is not installed: pip install 'fedsilo[tracking]'"
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
