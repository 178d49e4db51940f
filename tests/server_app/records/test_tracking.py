"""Tracking: means or exactly the rows of the run's files, also after a death, at no run's cost."""

import json
import logging
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records import tracking
from fedsilo.server_app.records.recorder import Recorder
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.server_app.records.tracking import (
    TRACKERS,
    Settings,
    Tracker,
    TrackingHook,
    means,
)
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from tests.support.soak import in_soak

Told = Counter[tuple[str, int, float]]
METRICS = [[0, "va", "test", "loss", 0.1], [1, "va", "train", "trained-loss", 1 / 3]]
LATER = [[1, "va", "test", "loss", 0.7], [1, "va", "test", "loss", 0.7]]
TRAFFIC = [[0, "hello", "va", 10, 20, 0.0, 0, 0], [1, "train", "va", 11, 2**40 + 1, 0.125, 3, 40]]
SETTINGS: Settings = {"method": "fedavg", "rounds": 2}


@pytest.fixture(autouse=True)
def _no_server_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.fixture(scope="module")
def without_tracker(
    tiny: Callable[..., dict[str, Value]], tmp_path_factory: pytest.TempPathFactory
) -> RunDirectory:
    """Return a run that nothing tracks, trained once for all trackers."""
    from fedsilo.engines.inline_engine import run_inline

    named = {"run.name": "run", "run.out": str(tmp_path_factory.mktemp("none"))}
    return run_inline(resolve(tiny("fedavg", rounds=2, sums_min_count=1) | named), 3)


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database that MLflow has just made: making one takes it seconds."""
    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    pytest.importorskip("mlflow").MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


def _lend_database(track: str, folder: Path, request: pytest.FixtureRequest) -> None:
    if track == "mlflow":
        shutil.copy(request.getfixturevalue("empty_database"), folder)


def _of_tensorboard(run_dir: Path) -> Told:
    events = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")
    from tensorboard.util.tensor_util import make_ndarray

    found = events.EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0})
    found.Reload()
    return Counter(
        (tag, event.step, float(make_ndarray(event.tensor_proto)))
        for tag in found.Tags()["tensors"]
        if tag != "settings/text_summary"
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


def _records(file: Path) -> Iterator[Any]:
    """Yield the records of a file that W&B wrote: LevelDB's log format, behind seven bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, part = file.read_bytes(), 7, b""
    while at < len(data):
        if (room := 2**15 - at % 2**15) < 7:
            at += room
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last of its parts
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            yield record
            part = b""


def _newest_of_wandb(run_dir: Path) -> list[Any]:
    pytest.importorskip("wandb")
    newest = max(run_dir.glob("wandb/offline-run-*/*.wandb"))  # named by time
    for _ in range(100):  # W&B's service may write on for a moment
        records = list(_records(newest))
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        time.sleep(0.1)
    raise AssertionError(f"{newest} has no end")


def _of_wandb(run_dir: Path) -> Told:
    told: Told = Counter()
    for record in _newest_of_wandb(run_dir):
        items = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        tags = {key: value for key, value in items.items() if key[0] != "_" and key != "round"}
        told.update((tag, items["round"], float(value)) for tag, value in tags.items())
    return told


READ = {"tensorboard": _of_tensorboard, "mlflow": _of_mlflow, "wandb": _of_wandb}


def _rows(metrics: Sequence[Sequence[Any]], traffic: Sequence[Sequence[Any]]) -> Told:
    return Counter((tag, step, value) for tag, step, value in means(metrics, traffic))


def _hook(track: str, run_dir: Path, resumed: bool = False) -> TrackingHook:
    recorder = Recorder(RunDirectory(run_dir))
    common = CommonSettings(track=track, resume=resumed)
    return TrackingHook(common, run_dir, recorder, SETTINGS)


def _take(hook: TrackingHook, metrics: Iterable[list[Any]], traffic: Iterable[list[Any]]) -> None:
    hook.recorder.written = [*metrics], [*traffic]


def _end(hook: TrackingHook) -> None:
    """Free the run's name as a death does; W&B also names folders by the second."""
    if hook.common.track == "wandb" and hook.tracker:
        hook.tracker.close()
        time.sleep(1.01 - time.time() % 1)  # until the next


def _start(hook: TrackingHook) -> None:
    hook.run_started(State({}), Participants({}, {}), 2)


@pytest.mark.parametrize("track", TRACKERS)
def test_a_runs_means_are_told_and_the_run_is_the_same(
    track: str,
    tiny: Callable[..., dict[str, Value]],
    inline_run: Callable[..., RunDirectory],
    without_tracker: RunDirectory,
) -> None:
    pytest.importorskip(track)
    tracked = inline_run(tiny("fedavg", rounds=2, sums_min_count=1) | {"track": track})
    for file in ("metrics.csv", "model.safetensors", "silos.json", "privacy.json"):
        assert (without_tracker.path / file).read_bytes() == (tracked.path / file).read_bytes()
    metrics = [list(row.values()) for row in tracked.read_csv("metrics.csv")]
    traffic = [list(row.values()) for row in tracked.read_csv("traffic.csv")]
    assert READ[track](tracked.path) == _rows(metrics, traffic)


@pytest.mark.parametrize("track", TRACKERS)
@pytest.mark.parametrize("known", in_soak([[2, 2], [1, 1], [0, 0]], but=[[1, 1]]))
def test_after_a_death_every_number_stands_once(
    track: str, known: tuple[int, int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip(track)
    _lend_database(track, tmp_path, request)
    run_dir = tmp_path / "run"
    before = _hook(track, run_dir)
    _start(before)
    _take(before, METRICS, TRAFFIC)
    before.round_ended(State({}, 1))  # and here it dies
    _end(before)
    after = _hook(track, run_dir, resumed=True)
    after.recorder.open = METRICS[: known[0]]  # restored
    after.recorder.traffic.write(TRAFFIC[: known[1]])
    _start(after)
    _take(after, [*METRICS[known[0] :], LATER[0]], TRAFFIC[known[1] :])
    after.run_ended(State({}, 1))
    assert READ[track](run_dir) == _rows(METRICS + LATER[:1], TRAFFIC)


def test_mlflow_follows_a_run_in_a_folder_whose_name_has_an_apostrophe(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run_dir = tmp_path / "o'brien" / "run"
    run_dir.mkdir(parents=True)
    _lend_database("mlflow", run_dir.parent, request)
    for resumed, value in enumerate(METRICS[:2]):
        hook = _hook("mlflow", run_dir, resumed=bool(resumed))
        _start(hook)
        _take(hook, [value], [])
        hook.run_ended(State({}, 1))
    assert READ["mlflow"](run_dir) == _rows(METRICS[:2], [])


def test_the_hook_keeps_nothing_in_a_checkpoint(tmp_path: Path) -> None:
    hook = _hook("tensorboard", tmp_path)
    assert hook.name == ""
    assert hook.state() is None


def test_means_are_over_sites_and_sums_over_a_rounds_messages() -> None:
    metrics = [
        [1, "a", "test", "accuracy", 0.5],
        [1, "b", "test", "accuracy", 1.0],
        [2, "a", "test", "accuracy", 0.25],
        [1, "a", "test", "auc", 0.75],  # b has one class
        [1, "a", "train", "trained-loss", 2.0],
        [1, "b", "train", "trained-loss", 4.0],
        [1, "a", "val", "trained-accuracy", 0.1],  # of its own model
        [1, "a", "test", "class.0.right", 7],
        [1, "a", "test", "accuracy-from-b", 0.3],
        [1, "a", "test", "own-accuracy", 0.3],
    ]
    traffic = [
        [0, "hello", "a", 100, 200, 0.0, 0, 0],
        [1, "train", "a", 10, 1, 0.5, 3, 40],
        [1, "train", "b", 20, 2, 0.25, 5, 60],
        [1, "distil", "b", 40, 4, 1.0, 1, 9],
        [1, "evaluate", "a", 500, 600, 9.0, 0, 0],
    ]
    assert means(metrics, traffic) == [
        ("test/accuracy", 1, 0.75),
        ("test/accuracy", 2, 0.25),
        ("test/auc", 1, 0.75),
        ("train/trained-loss", 1, 3.0),
        ("traffic/bytes_down", 1, 70.0),
        ("traffic/bytes_up", 1, 7.0),
        ("traffic/seconds", 1, 1.75),
        ("traffic/steps", 1, 9.0),
        ("traffic/samples", 1, 109.0),
    ]


def test_a_run_has_about_twenty_tags_by_default(
    tiny: Callable[..., dict[str, Value]], inline_run: Callable[..., RunDirectory]
) -> None:
    pytest.importorskip("tensorboard")
    run = inline_run(tiny("fedavg", rounds=2, sums_min_count=1) | {"track": "tensorboard"})
    told = _of_tensorboard(run.path)
    assert 15 <= len({tag for tag, _, _ in told}) <= 25
    assert not [tag for tag, _, _ in told if "s1a" in tag]
    summary = run.read_json("summary.json")
    assert ("test/accuracy", 2, summary["mean"]["accuracy"]) in told
    rows = [row for row in run.read_csv("traffic.csv") if row["phase"] == "train"]
    steps = float(sum(int(row["steps"]) for row in rows if row["round"] == "2"))
    assert ("traffic/steps", 2, steps) in told


@pytest.mark.parametrize("track", TRACKERS)
def test_settings_are_told_once(track: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip(track)
    _lend_database(track, tmp_path, request)
    run_dir = tmp_path / "run"
    for resumed in (False, True):
        hook = _hook(track, run_dir, resumed)
        _start(hook)
        _take(hook, METRICS, [])
        hook.run_ended(State({}))
        if not resumed:
            _end(hook)
    assert _settings_of(track, run_dir) == {"method": "fedavg", "rounds": "2"}


def _settings_of(track: str, run_dir: Path) -> dict[str, str]:
    if track == "tensorboard":
        from tensorboard.backend.event_processing import plugin_event_accumulator

        events = plugin_event_accumulator.EventAccumulator(str(run_dir / "tensorboard"))
        events.Reload()
        (event,) = events.Tensors("settings/text_summary")
        lines = event.tensor_proto.string_val[0].decode().splitlines()[2:]
        return dict(line.strip("| ").split(" | ") for line in lines)
    if track == "mlflow":
        import mlflow

        client = mlflow.MlflowClient(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("fedsilo").experiment_id
        (run,) = client.search_runs([experiment])
        return dict(run.data.params)
    (record,) = (r for r in _newest_of_wandb(run_dir) if r.WhichOneof("record_type") == "run")
    assert record.run.host == ""
    said = {item.key: str(json.loads(item.value_json)) for item in record.run.config.update}
    return {key: value for key, value in said.items() if key != "_wandb"}


def _broken(run_dir: Path, settings: Settings, resumed: bool) -> Tracker:
    """Be a tracker whose server goes away."""
    try:
        yield
    except GeneratorExit:
        raise AssertionError("nothing is left to close") from None
    raise ConnectionError("the server\nis away")


def test_a_failure_is_told_once_in_a_line_and_ends_tracking_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "TRACKERS", {"broken": _broken})
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
    def missing(run_dir: Path, settings: Settings, resumed: bool) -> Tracker:
        yield from ()
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
