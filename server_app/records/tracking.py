"""Sends metrics to TensorBoard, MLflow or Weights & Biases after each round.

There are about twenty scalars. Each is the mean of a metric over the sites, ``<split>/<metric>``,
or a sum over the sites in a round, ``traffic/<bytes_down, bytes_up, seconds, steps or samples>``.
A tracker is read by others, so the means are over the values that a report may show (``shown.py``).
The settings that decide the result are sent once. The hook stores nothing in the checkpoint, so a
run is the same with and without it. A failure prints one line and does not end the run.

A tracker is a generator: it opens its destination, receives lists of scalars, and ends when it is
closed. A resumed run sends all rows of its checkpoint again. TensorBoard removes the earlier rows
(``purge_step``), MLflow receives only the missing ones, and W&B gets them at the same rounds.
"""

import fcntl
import hashlib
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedsilo.core.errors import missing_extra
from fedsilo.core.messages import EVALUATE
from fedsilo.core.one_line import one_line
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.core.site_facts import SPLITS
from fedsilo.server_app.records import summary
from fedsilo.server_app.records.recorder import TRAFFIC_HEADER, Recorder, Row
from fedsilo.server_app.records.run_directory import silos_document
from fedsilo.server_app.records.shown import Floors
from fedsilo.strategies.loop.hooks import Hook
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants

_METRICS_AT_ONCE, _PARAMS_AT_ONCE = 1000, 100  # MLflow's limits for one request
_NOT_IN_A_KEY = re.compile(r"[^\w\-. /:]")
_PROJECT, _TAG = "fedsilo", "fedsilo.run-directory"
_PART = re.compile(r"\.|-from-|^own-")  # matches metrics of a class, a bin or a single site's model
# An unreachable server may cost seconds, not minutes; the user's own variables take precedence
_IMPATIENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}

Settings = Mapping[str, Value]


class Scalar(NamedTuple):
    """A number to send: its name (``tag``), its round (``step``) and its value."""

    tag: str
    step: int
    value: float


Tracker = Generator[None, Sequence[Scalar], None]


def _open_tensorboard(run_dir: Path, settings: Settings, resumed: bool) -> Tracker:
    """Open a tracker that writes event files to ``<run-dir>/tensorboard``, in double precision.

    The tracker is a generator. The first call of ``next`` writes the settings, as a Markdown table.
    After that, ``send`` takes a list of (name, round, value), which is written immediately. Closing
    the tracker closes the files.

    A resumed run sends all its values again. TensorBoard is therefore told to hide the older events
    in the same folder, but their files stay. Every run does so, and ``resumed`` is not used.
    """
    from torch.utils.tensorboard import SummaryWriter

    # A new run purges too, because TensorBoard recognises a restart only at the second purge
    with closing(SummaryWriter(str(run_dir / "tensorboard"), purge_step=0)) as writer:
        lines = ["| setting | value |", "| --- | --- |"]
        for key, value in settings.items():
            lines.append(f"| {key} | {value} |")
        writer.add_text("settings", "\n".join(lines))
        while True:
            for tag, step, value in (yield):
                writer.add_scalar(tag, value, step, new_style=True, double_precision=True)
            writer.flush()


def _open_mlflow(run_dir: Path, settings: Settings, resumed: bool) -> Tracker:
    """Open a tracker that writes an MLflow run to the address in $MLFLOW_TRACKING_URI.

    Without an address, the tracker writes to ``mlflow.db`` in the folder that contains the run
    directory. The tracker is a generator: ``send`` gives it a list of (name, round, value), and
    closing it ends the MLflow run.

    If ``resumed``, the tracker continues the MLflow run of this run directory, and skips values
    that MLflow has already. Otherwise it creates an MLflow run with the settings as parameters. It
    also does so if there is no MLflow run to continue.
    """
    for name, patience in _IMPATIENT.items():
        os.environ.setdefault(name, patience)
    import mlflow
    from mlflow.entities import Metric

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run_dir.parent / 'mlflow.db'}"
    with (run_dir.parent / ".mlflow.lock").open("w") as file:
        # Without the lock, two runs could both create the tables
        fcntl.flock(file, fcntl.LOCK_EX)
        client = mlflow.MlflowClient(uri)
        found = client.get_experiment_by_name(_PROJECT)
        experiment = found.experiment_id if found else client.create_experiment(_PROJECT)
    run = ""
    if resumed:
        run = _find_mlflow_run(client, experiment, run_dir)
    if not run:
        run = _create_mlflow_run(client, experiment, run_dir, settings)
    sent = _count_mlflow_metrics(client, run)
    try:
        while True:
            fresh = []
            for tag, step, value in (yield):
                key = _NOT_IN_A_KEY.sub("_", tag)
                # A value that MLflow has already uses up one count instead of being sent again
                if sent[key, step]:
                    sent[key, step] -= 1
                else:
                    fresh.append(Metric(key, value, 0, step))
            for start in range(0, len(fresh), _METRICS_AT_ONCE):
                client.log_batch(run, metrics=fresh[start : start + _METRICS_AT_ONCE])
    except GeneratorExit:
        client.set_terminated(run)


def _find_mlflow_run(client: Any, experiment: str, run_dir: Path) -> str:
    """Return the id of the MLflow run that belongs to this run directory, or "" if there is none.

    The run is found by its tag ``fedsilo.run-directory``, whose value is the directory's path. Only
    one match is returned.

    Args:
        client: the MLflow client.
        experiment: the id of the MLflow experiment to search.
        run_dir: the run directory.
    """
    quote = "'"
    # MLflow cannot escape a quote
    if quote in str(run_dir):
        quote = '"'
    same = f"tags.`{_TAG}` = {quote}{run_dir}{quote}"
    for run in client.search_runs([experiment], same, max_results=1):
        return str(run.info.run_id)
    return ""


def _create_mlflow_run(client: Any, experiment: str, run_dir: Path, settings: Settings) -> str:
    """Create an MLflow run with the settings as its parameters, and return the run's id.

    The MLflow run is named after the run directory. Its tag ``fedsilo.run-directory`` has the
    directory's path. The settings' values are logged as strings, in several requests if there are
    many.
    """
    from mlflow.entities import Param

    tags = {_TAG: str(run_dir)}
    run = client.create_run(experiment, run_name=run_dir.name, tags=tags).info.run_id
    params = []
    for key, value in settings.items():
        params.append(Param(key, str(value)))
    for start in range(0, len(params), _PARAMS_AT_ONCE):
        client.log_batch(run, params=params[start : start + _PARAMS_AT_ONCE])
    return str(run)


def _count_mlflow_metrics(client: Any, run: str) -> Counter[tuple[str, int]]:
    """Count the values that an MLflow run already has: (name, round) -> number of values.

    The caller skips these values, because MLflow stores a value again each time it is sent.
    """
    sent: Counter[tuple[str, int]] = Counter()
    for key in client.get_run(run).data.metrics:
        for metric in client.get_metric_history(run, key):
            sent[key, metric.step] += 1
    return sent


def _open_wandb(run_dir: Path, settings: Settings, resumed: bool) -> Tracker:
    """Open a tracker that writes a run to the project ``fedsilo`` of Weights & Biases (W&B).

    The tracker is a generator: ``send`` gives it a list of (name, round, value), and closing it
    ends the run. Without an account on this machine, or with ``WANDB_MODE=offline``, the data stay
    in ``<run-dir>/wandb``. No code, git state, console output or machine data is sent. If
    ``resumed``, the W&B run of this run directory continues.
    """
    import wandb

    mode: Literal["offline"] | None = None
    resume: Literal["allow"] | None = None
    # The user's own WANDB_MODE decides; if it is not set, an account is needed to send data
    if "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False):
        mode = "offline"
    if resumed:
        resume = "allow"
    quiet = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=20,
        finish_timeout=60,
        host="",
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
    )
    run = wandb.init(
        project=_PROJECT,
        name=run_dir.name,
        id=hashlib.sha256(str(run_dir).encode()).hexdigest()[:16],
        resume=resume,
        dir=run_dir,
        config=dict(settings),
        mode=mode,
        reinit="create_new",
        settings=quiet,
    )
    run.define_metric("*", step_metric="round")
    try:
        while True:
            rounds: dict[int, dict[str, float]] = defaultdict(dict)
            for tag, step, value in (yield):
                rounds[step][tag] = value
            for step in sorted(rounds):
                run.log({"round": step, **rounds[step]})
    finally:
        run.finish()


TRACKERS: Mapping[str, Callable[[Path, Settings, bool], Tracker]] = {
    "tensorboard": _open_tensorboard,
    "mlflow": _open_mlflow,
    "wandb": _open_wandb,
}


class TrackingHook(Hook):
    """Sends the recorder's new rows to a tracker. Must come after the recorder and the checkpoint.

    The ``decisive`` settings, which decide the result, are sent at the start.
    """

    def __init__(
        self, common: CommonSettings, run_dir: Path, recorder: Recorder, decisive: Settings
    ) -> None:
        self.common, self.run_dir, self.recorder = common, run_dir, recorder
        self.decisive = decisive
        self.tracker: Tracker | None = None
        self.silos: Mapping[str, Any] = {}

    def run_started(self, state: State, participants: Participants, total_rounds: int) -> None:
        """Open the tracker that 'run.track' names, and send it the rows recorded so far.

        Only a resumed run has such rows, which its checkpoint restored. Rows of metrics.csv are
        sent only if they may be shown. If opening or sending fails, a line is logged, and the run
        continues without the tracker. ``state`` and ``total_rounds`` are not used.
        """
        self.silos = silos_document(participants)
        with self._stop_on_failure():
            open_tracker = TRACKERS[self.common.track]
            self.tracker = open_tracker(self.run_dir, self.decisive, self.common.resume)
            next(self.tracker)
            metrics = [*self.recorder.metrics.rows(), *self.recorder.open]
            self.tracker.send(means(self._select_shown(metrics), self.recorder.traffic.rows()))

    def participants_changed(
        self, round_: int, participants: Participants, joined: list[str]
    ) -> None:
        """Store the facts of all sites, with the new ones: they decide which rows may be sent."""
        self.silos = silos_document(participants)

    def round_ended(self, state: State) -> None:
        """Send the rows that the round has added."""
        self._send_written(None)

    def run_ended(self, state: State) -> None:
        """Send the rows that the final evaluation has added, and close the tracker."""
        self._send_written(state.round)
        if self.tracker:
            with self._stop_on_failure():
                self.tracker.close()

    def _send_written(self, last_round: int | None) -> None:
        if self.tracker:
            metrics, traffic = self.recorder.written
            with self._stop_on_failure():
                self.tracker.send(means(self._select_shown(metrics, last_round), traffic))

    def _select_shown(self, rows: Iterable[Row], last_round: int | None = None) -> Iterator[Row]:
        """Yield the rows of metrics.csv that may be shown to others, and so sent to a tracker.

        Args:
            rows: rows of metrics.csv.
            last_round: the number of the last round, once the final evaluation has ended. None
                while the run goes on. The last round has metrics by class, from which more can be
                computed. So an accuracy of that round may have to be hidden.
        """
        last: dict[str, Any] = {split: {} for split in SPLITS}
        if last_round is not None:
            last = {split: self.recorder.values(last_round, split) for split in SPLITS}
        floors = Floors(self.common, self.silos, -1 if last_round is None else last_round, last)
        for row in rows:
            at, site, split, metric, value = row
            if floors.shows(int(at), str(site), str(split), str(metric), float(value)):
                yield row

    @contextmanager
    def _stop_on_failure(self) -> Iterator[None]:
        """Run the ``with`` block. If it fails, log a warning, and send nothing more in this run.

        The exception is not raised again, so the run continues. ``tracker`` becomes None. If a
        library is missing, the warning says which optional dependencies of fedsilo must be
        installed.
        """
        try:
            yield
        except Exception as error:  # libraries and servers may fail in any way
            self.tracker, reason = None, one_line(f"{type(error).__name__}: {error}")
            if isinstance(error, ImportError):
                reason = missing_extra(f"'run.track' {self.common.track}", "tracking")
            line = "tracking with %s ends, and the run continues: %s"
            logging.getLogger("flwr").warning(line, self.common.track, reason)


def means(metrics: Iterable[Row], traffic: Iterable[Row]) -> list[Scalar]:
    """Compute each round's means of metrics and sums of traffic over sites, for a tracker.

    The name (``tag``) of a mean is ``<split>/<metric>``, and that of a sum ``traffic/<column>``.
    Means are unweighted. These rows are left out:

    - metrics of one class or bin,
    - metrics with the prefix ``own-`` or of another site's model,
    - metrics with the prefix ``trained-``, except on the training split,
    - traffic of introductions ("hello") and of the final evaluation.

    Args:
        metrics: rows of metrics.csv.
        traffic: rows of traffic.csv.
    """
    values: dict[tuple[str, int], dict[str, dict[str, float]]] = {}
    for round_, site, split, metric, value in metrics:
        own = metric.startswith("trained-") and split != "train"
        if not own and not _PART.search(metric):
            of_sites = values.setdefault((f"{split}/{metric}", int(round_)), {})
            of_sites[site] = {metric: float(value)}
    scalars = []
    for (tag, step), of_sites in values.items():
        (mean,) = summary.means(of_sites).values()
        scalars.append(Scalar(tag, step, mean))
    sums: dict[tuple[str, int], float] = defaultdict(float)
    for round_, phase, _, *numbers in traffic:
        if phase not in ("hello", EVALUATE):
            # A file of an earlier version has fewer columns, so the lengths may differ
            for name, value in zip(TRAFFIC_HEADER[3:], numbers, strict=False):
                sums[f"traffic/{name}", int(round_)] += float(value)
    for (tag, step), value in sums.items():
        scalars.append(Scalar(tag, step, value))
    return scalars
