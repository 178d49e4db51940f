"""Many short runs: what is kept, in which order it comes back, and what a failure leaves."""

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from fedsilo.comparison import trials
from fedsilo.comparison.slurm import Slurm
from fedsilo.comparison.trials import Trial, WorkerPool, run_trials
from fedsilo.core.errors import RunDirectoryError, RunFailedError
from fedsilo.core.settings_schema import Value
from fedsilo.server_app.config.settings import resolve
from tests.support.errors import refuses
from tests.support.run_files import summary
from tests.support.setting_keys import as_keys

LOCAL: dict[str, Value] = {
    "method": "local",
    "dataset": "heart-synthetic",
    "rounds": 1,
    "train.local-steps": 1,
    "server.evaluate-every": 0,
    "network.dropout": 0.0,
    "train.mc-passes": 0,
    "machine.device": "cpu",
}


def _trial(**changes: Value) -> Trial:
    named = as_keys(changes)
    return Trial(resolve(LOCAL | named), named, "data")


def test_a_key_depends_on_what_decides_the_result_and_on_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = _trial(seed=1).key()
    settings = resolve(LOCAL | {"seed": 1})
    assert key == Trial(settings, {"other": "label"}, "data").key()
    assert key == _trial(seed=1, out="/elsewhere", run_name="x", reply_timeout=1.0).key()
    assert key == _trial(seed=1, data_dir="/other/data").key(), "what lies there is what counts"
    others = [
        _trial(seed=2),
        _trial(seed=1, learning_rate=0.5),
        _trial(seed=1, use_test=False, val_folds=2),
        _trial(seed=1, method="fedavg"),
        Trial(settings, {"seed": 1}, "other data"),
    ]
    assert len({key, *(trial.key() for trial in others)}) == 6
    monkeypatch.setattr(trials, "git_revision", lambda: "another version")
    assert _trial(seed=1).key() != key


def test_summaries_that_are_there_come_back_in_the_order_of_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> str:
        raise AssertionError("a trial that has a summary was run")

    monkeypatch.setattr(trials, "_run_trial", never)
    wanted = [_trial(seed=seed) for seed in (3, 1, 2, 1)]
    for trial in wanted:
        (tmp_path / f"{trial.key()}.json").write_text(json.dumps(summary(**trial.label)))
    assert [found["seed"] for found in run_trials(wanted, tmp_path, 2)] == [3, 1, 2, 1]
    assert multiprocessing.active_children() == []


def test_a_failing_trial_is_told_by_its_label_and_what_is_finished_stays(tmp_path: Path) -> None:
    """Of a plug's network, which a worker process knows too."""
    file = tmp_path / "rows.py"
    file.write_text(
        "from math import prod\n"
        "from torch import nn\n"
        "def build(input_shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), classes))\n"
    )
    plug: dict[str, Value] = {"plugin": str(file), "network.name": "rows:build"}
    points: list[dict[str, Value]] = [{"seed": 1}, {"seed": 2, "privacy.sums-min-count": 31}]
    good, bad = (Trial(resolve(LOCAL | plug | point), point, "data") for point in points)
    folder = tmp_path / "trials"
    point = r"\{'seed': 2, 'privacy.sums-min-count': 31\}"
    told = rf"trial {point} failed: .*site switzerland sends no sums"
    with pytest.raises(RunFailedError, match=told):
        run_trials([good, bad], folder, 1)
    assert [path.name for path in folder.iterdir()] == [f"{good.key()}.json"]
    before = (folder / f"{good.key()}.json").stat().st_mtime_ns
    (summary,) = run_trials([good], folder, 1)
    assert summary["mean"]
    assert list(summary["sites"]) == ["cleveland", "hungary", "switzerland", "va"]
    assert (folder / f"{good.key()}.json").stat().st_mtime_ns == before


def test_as_many_runs_at_once_as_the_cores_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "cores", lambda: 6)
    assert [trials.runs_at_once(0, threads) for threads in (1, 2, 4, 8)] == [6, 3, 1, 1]
    assert trials.runs_at_once(3, 2) == 3


def test_trials_of_more_threads_run_fewer_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "cores", lambda: 6)
    seen: list[int] = []

    def note_workers(jobs: object, folder: Path, workers: int) -> WorkerPool:
        seen.append(workers)
        return WorkerPool(workers)

    monkeypatch.setattr(trials, "make_pool", note_workers)
    trial = _trial(threads=3)
    (tmp_path / f"{trial.key()}.json").write_text(json.dumps(summary()))
    run_trials([trial], tmp_path, 0)
    run_trials([trial], tmp_path, 4)
    assert seen == [2, 4]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Keep this process's signal handlers, which a worker's functions set."""
    numbers = (signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_worker_is_silent_ends_with_its_command_and_blocks_ctrl_c_until_it_works(
    handlers: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bound: list[tuple[int, signal.Signals]] = []
    silenced: list[int] = []
    monkeypatch.setattr(trials, "end_with", lambda *given: bound.append(given))
    monkeypatch.setattr(os, "dup2", lambda _, descriptor: silenced.append(descriptor))
    trials._begin_worker(7)
    assert (bound, silenced) == ([(7, signal.SIGUSR1)], [1, 2])
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGUSR1)

    def blocked() -> bool:
        return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])

    assert blocked()
    stop = tmp_path / "stop"
    assert not trials._in_worker(stop, blocked)
    assert blocked()
    # Sent to this thread alone: another one, of a library, would take it at once
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trials._in_worker(stop, pytest.fail, "a run began after Ctrl-C")
    stop.touch()
    with pytest.raises(KeyboardInterrupt):
        trials._in_worker(stop, pytest.fail, "a run began in a pool that ends")
    assert blocked()


def test_a_command_that_ends_during_a_run_ends_the_worker_and_not_only_the_run(
    handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(code: int) -> None:
        raise ProcessLookupError(code)

    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(ProcessLookupError):
        trials._in_worker(Path("stop"), lambda: sys.exit(1))


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '"text"', None])
def test_a_damaged_summary_is_named_and_its_trial_can_be_run_again(
    content: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_text(content)
    with refuses(RunDirectoryError, path):
        trials._read_summary(path)


def test_a_dead_worker_is_told_and_an_error_lets_no_other_run_begin() -> None:
    class Pool:
        """A pool that answers at once, with the outcome of the function."""

        cancelled = False

        def submit(self, work: Any, item: Any) -> Future[Any]:
            future: Future[Any] = Future()
            try:
                future.set_result(work(item))
            except Exception as error:
                future.set_exception(error)
            return future

        def shutdown(self, cancel_futures: bool) -> None:
            self.cancelled = cancel_futures

    def die(item: int) -> None:
        raise BrokenProcessPool

    pool: Any = Pool()
    with refuses(RunFailedError, "--jobs"):
        trials.run_missing(pool, die, [1], lambda *_: None)
    assert not pool.cancelled

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trials.run_missing(pool, str, [1], stop)
    assert pool.cancelled


def test_jobs_of_slurm_have_a_pool_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "SlurmPool", lambda jobs, folder: (jobs, folder))
    slurm = Slurm({})
    assert trials.make_pool(slurm, tmp_path, 0) == (slurm, tmp_path)


def test_a_trial_is_run_in_this_process_too_and_told_by_its_code(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    values = LOCAL | {"privacy.sums-min-count": 31}
    failure = trials._run_trial(trials._Work(values, path))
    assert failure
    assert (failure.code, path.exists()) == ("site", False)
    assert trials._run_trial(trials._Work(LOCAL, path)) is None
    assert len(trials._read_summary(path)["digest"]) == 64
