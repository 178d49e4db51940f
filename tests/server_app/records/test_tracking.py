"""Tracking: exactly the rows of the run's files, also after a death, and never at a run's cost."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records import tracking
from fedsilo.server_app.records.recorder import Recorder
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.records.tracking import TRACKERS, Scalar, TrackingHook
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from tests.support.soak import in_soak

Told = Counter[tuple[str, int, float]]
METRICS = [[0, "va", "test", "loss", 0.1], [1, "va", "train", "trained-loss", 1 / 3]]
LATER = [[1, "va", "test", "loss", 0.7], [1, "va", "test", "loss", 0.7]]
TRAFFIC = [[0, "hello", "va", 10, 20, 0.0], [1, "train", "va", 11, 2**40 + 1, 0.125]]


@pytest.fixture(autouse=True)
def _no_server_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def _of_tensorboard(run_dir: Path) -> Told:
    events = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")
    from tensorboard.util.tensor_util import make_ndarray

    found = events.EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0})
    found.Reload()
    return Counter(
        (tag, event.step, float(make_ndarray(event.tensor_proto)))
        for tag in found.Tags()["tensors"]
        for event in found.Tensors(tag)
    )


def _of_mlflow(run_dir: Path) -> Told:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fedsilo").experiment_id
    (run,) = client.search_runs([experiment], f"attributes.run_name = '{run_dir.name}'")
    return Counter(
        (key, metric.step, metric.value)
        for key in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, key)
    )


READ = {"tensorboard": _of_tensorboard, "mlflow": _of_mlflow}
PACKAGE = {"tensorboard": "tensorboard", "mlflow": "mlflow"}


def _rows(metrics: Sequence[Sequence[Any]], traffic: Sequence[Sequence[Any]]) -> Told:
    told: Told = Counter()
    for round_, site, split, metric, value in metrics:
        told[f"{split}/{metric}/{site}", int(round_), float(value)] += 1
    for round_, phase, site, down, up, seconds in traffic:
        for name, value in (("bytes_down", down), ("bytes_up", up), ("seconds", seconds)):
            told[f"traffic/{phase}/{name}/{site}", int(round_), float(value)] += 1
    return told


def _hook(track: str, run_dir: Path, resumed: bool = False) -> TrackingHook:
    return TrackingHook(track, run_dir, Recorder(RunDirectory(run_dir)), resumed)


def _take(hook: TrackingHook, metrics: Iterable[list[Any]], traffic: Iterable[list[Any]]) -> None:
    hook.recorder.written = [*metrics], [*traffic]


def _start(hook: TrackingHook) -> None:
    hook.run_started(State({}), Participants({}, {}), 2)


@pytest.mark.parametrize("track", TRACKERS)
def test_a_runs_rows_are_told_and_the_run_is_the_same(
    track: str, tiny: Callable[..., dict[str, Value]], tmp_path: Path
) -> None:
    pytest.importorskip(PACKAGE[track])
    from fedsilo.server_app.run.inline_engine import run_inline

    runs = {}
    for choice in ("none", track):
        values = tiny("fedavg", rounds=2) | {"track": choice, "out": str(tmp_path / choice)}
        runs[choice] = run_inline(resolve(values | {"run-name": "run"}), 3)
    plain, tracked = runs["none"], runs[track]
    for file in ("metrics.csv", "model.safetensors", "silos.json", "privacy.json"):
        assert (plain.path / file).read_bytes() == (tracked.path / file).read_bytes()
    metrics = [list(row.values()) for row in tracked.read_csv("metrics.csv")]
    traffic = [list(row.values()) for row in tracked.read_csv("traffic.csv")]
    assert READ[track](tracked.path) == _rows(metrics, traffic)


@pytest.mark.parametrize("track", TRACKERS)
@pytest.mark.parametrize("known", in_soak([[2, 2], [1, 1], [0, 0]], but=[[1, 1]]))
def test_after_a_death_every_row_stands_once(
    track: str, known: tuple[int, int], tmp_path: Path
) -> None:
    pytest.importorskip(PACKAGE[track])
    run_dir = tmp_path / "run"
    before = _hook(track, run_dir)
    _start(before)
    _take(before, METRICS, TRAFFIC)
    before.round_ended(State({}, 1))  # and here it dies
    after = _hook(track, run_dir, resumed=True)
    after.recorder.open = METRICS[: known[0]]  # restored
    after.recorder.traffic.write(TRAFFIC[: known[1]])
    _start(after)
    _take(after, [*METRICS[known[0] :], LATER[0]], TRAFFIC[known[1] :])
    after.run_ended(State({}, 1))
    assert READ[track](run_dir) == _rows(METRICS + LATER[:1], TRAFFIC)


def test_the_hook_keeps_nothing_in_a_checkpoint(tmp_path: Path) -> None:
    hook = _hook("tensorboard", tmp_path)
    assert hook.name == ""
    assert hook.state() is None


class _Broken:
    """A tracker whose server goes away."""

    def __init__(self, run_dir: Path, resumed: bool) -> None:
        self.asked = 0

    def write(self, scalars: Sequence[Scalar]) -> None:
        self.asked += 1
        raise ConnectionError("the server\nis away")

    def close(self) -> None:
        raise AssertionError("nothing is left to close")


def test_a_failure_is_told_once_in_a_line_and_ends_tracking_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "TRACKERS", {"broken": _Broken})
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    hook = _hook("broken", tmp_path)
    _start(hook)
    hook.round_ended(State({}, 1))
    hook.run_ended(State({}, 1))
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "tracking with broken ends, and the run continues: ConnectionError: the server is away"
    ]


def test_a_package_that_is_missing_says_how_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(run_dir: Path, resumed: bool) -> None:
        raise ModuleNotFoundError("No module named 'tensorboard'")

    monkeypatch.setattr(tracking, "TRACKERS", {"tensorboard": missing})
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    _start(_hook("tensorboard", tmp_path))
    assert "pip install 'fedsilo[tracking]'" in caplog.text


def test_numbers_keep_all_their_digits(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    hook = _hook("tensorboard", tmp_path / "run")
    hook.recorder.open = [[0, "va", "test", "loss", np.nextafter(0.1, 1)]]
    _start(hook)
    hook.run_ended(State({}))
    ((_, _, value),) = _of_tensorboard(tmp_path / "run")
    assert value == np.nextafter(0.1, 1)
