"""Metrics where people look: rows of ``metrics.csv`` and ``traffic.csv`` in TensorBoard or MLflow.

Each row becomes one scalar at its round: ``<split>/<metric>/<site>``, and of a message
``traffic/<phase>/<bytes_down, bytes_up or seconds>/<site>``. The hook stores nothing in the
checkpoint, so that a run is the same with and without it. A resumed run sends all rows of its
checkpoint again where earlier ones are removed by ``purge_step`` (TensorBoard), and only what was
not sent yet where they cannot be removed (MLflow). A failure is one line and ends no run.
"""

import fcntl
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedsilo.models.contract.one_line import one_line
from fedsilo.server_app.records.recorder import TRAFFIC_HEADER, Recorder, Row
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants

_AT_ONCE = 1000  # metrics that MLflow takes in a request
_NOT_IN_A_KEY = re.compile(r"[^\w\-. /:]")
_EXPERIMENT, _TAG = "fedsilo", "fedsilo.run-directory"
# A server that is away may cost a run seconds, not minutes; the user's environment goes first
_IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


class Scalar(NamedTuple):
    """A number with a name, at a round."""

    tag: str
    step: int
    value: float


class Tracker(Protocol):
    """Where scalars go."""

    def write(self, scalars: Sequence[Scalar]) -> None:
        """Store scalars in their order."""
        ...

    def close(self) -> None:
        """Finish: no more scalars come."""
        ...


class TensorBoard:
    """Event files in ``<run-dir>/tensorboard``, numbers with all their digits."""

    def __init__(self, run_dir: Path, resumed: bool) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # In a new run too, as readers only treat a second start as a restart
        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=0)
        self.close = self._writer.close

    def write(self, scalars: Sequence[Scalar]) -> None:
        """Add them and flush."""
        for tag, step, value in scalars:
            self._writer.add_scalar(tag, value, step, new_style=True, double_precision=True)
        self._writer.flush()


class MLflow:
    """A run of the experiment ``fedsilo`` at ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` beside it.

    A resumed run continues the MLflow run that has its directory as a tag.
    """

    def __init__(self, run_dir: Path, resumed: bool) -> None:
        for name, value in _IMPATIENT.items():
            os.environ.setdefault(name, value)
        import mlflow

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run_dir.parent / 'mlflow.db'}"
        self._sent: Counter[tuple[str, int]] = Counter()
        with (run_dir.parent / ".mlflow.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # two runs would both make the tables
            client = self._client = mlflow.MlflowClient(uri)
            found = client.get_experiment_by_name(_EXPERIMENT)
            experiment = found.experiment_id if found else client.create_experiment(_EXPERIMENT)
        runs = client.search_runs([experiment], f"tags.`{_TAG}` = '{run_dir}'", max_results=1)
        for run in runs if resumed else ():
            for key in run.data.metrics:
                history = client.get_metric_history(run.info.run_id, key)
                self._sent.update((key, metric.step) for metric in history)
            self._run = str(run.info.run_id)
            return
        made = client.create_run(experiment, run_name=run_dir.name, tags={_TAG: str(run_dir)})
        self._run = str(made.info.run_id)

    def write(self, scalars: Sequence[Scalar]) -> None:
        """Log the scalars that the run does not have yet."""
        from mlflow.entities import Metric

        fresh = []
        for scalar in scalars:
            key = _NOT_IN_A_KEY.sub("_", scalar.tag)
            if self._sent[key, scalar.step]:
                self._sent[key, scalar.step] -= 1
            else:
                fresh.append(Metric(key, scalar.value, 0, scalar.step))
        for start in range(0, len(fresh), _AT_ONCE):
            self._client.log_batch(self._run, metrics=fresh[start : start + _AT_ONCE])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


TRACKERS: Mapping[str, Callable[[Path, bool], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
}


class TrackingHook(Hook):
    """Sends a tracker what the recorder has written; comes after the recorder and the checkpoint.

    Args:
        track: one of ``TRACKERS``.
        run_dir: the run directory.
        recorder: writes the rows.
        resumed: whether the run was begun by another process.
    """

    def __init__(self, track: str, run_dir: Path, recorder: Recorder, resumed: bool) -> None:
        self.track, self.run_dir, self.recorder, self.resumed = track, run_dir, recorder, resumed
        self.tracker: Tracker | None = None

    def run_started(self, state: State, participants: Participants, total_rounds: int) -> None:
        """Open the tracker, and send what a checkpoint knows."""
        with self._harmless():
            self.tracker = TRACKERS[self.track](self.run_dir, self.resumed)
            metrics = [*self.recorder.metrics.rows(), *self.recorder.open]
            self.tracker.write(_scalars(metrics, self.recorder.traffic.rows()))

    def round_ended(self, state: State) -> None:
        """Send what the round has added."""
        if self.tracker:
            with self._harmless():
                self.tracker.write(_scalars(*self.recorder.written))

    def run_ended(self, state: State) -> None:
        """Send what the final evaluation has added, and close the tracker."""
        self.round_ended(state)
        if self.tracker:
            with self._harmless():
                self.tracker.close()

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """End the tracking, and not the run, if the block fails."""
        try:
            yield
        except Exception as error:  # whatever a library and its server can do
            self.tracker, reason = None, one_line(f"{type(error).__name__}: {error}")
            if isinstance(error, ImportError):
                reason = f"{self.track} is not installed: pip install 'fedsilo[tracking]'"
            line = "tracking with %s ends, and the run continues: %s"
            logging.getLogger("flwr").warning(line, self.track, reason)


def _scalars(metrics: Iterable[Row], traffic: Iterable[Row]) -> list[Scalar]:
    """Return the rows of metrics.csv and of traffic.csv as numbers with a name and a round."""
    found = [
        Scalar(f"{split}/{metric}/{site}", int(round_), float(value))
        for round_, site, split, metric, value in metrics
    ]
    for round_, phase, site, *values in traffic:
        for name, value in zip(TRAFFIC_HEADER[3:], values, strict=True):
            found.append(Scalar(f"traffic/{phase}/{name}/{site}", int(round_), float(value)))
    return found
