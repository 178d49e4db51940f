"""The engine of several processes: its workers, what kills them, and what reaches them."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict

from fedsilo.core.errors import ProcessError, SiteError
from fedsilo.core.processes import runs
from fedsilo.core.settings_schema import Value
from fedsilo.engines import process_engine
from fedsilo.engines.inline_engine import flower_identity
from fedsilo.engines.process_engine import run_with_processes
from fedsilo.server_app.config.settings import resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from fedsilo.strategies.wire.parcels import Packing, unpack
from tests.support.errors import refuses
from tests.support.soak import in_soak
from tests.support.tiny import VARIANTS

Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]


@pytest.fixture
def sent() -> Iterator[Callable[..., Message]]:
    """Return a function that makes a message of arrays."""
    with flower_identity():
        yield lambda **arrays: Message(RecordDict({"arrays": ArrayRecord(arrays)}), 1001, "train")


def _bytes(directory: RunDirectory) -> list[bytes]:
    names = ("metrics.csv", "model.safetensors")
    paths = [*(directory.path / name for name in names), *directory.path.glob("sites/*/*")]
    return [path.read_bytes() for path in sorted(paths)]


def test_large_arrays_are_shared_small_ones_are_not(sent: Callable[..., Message]) -> None:
    large, small = np.arange(50_000, dtype=np.float32), np.arange(3, dtype=np.float32)
    data, shared = Packing().pack(sent(a=Array(large), b=Array(small), c=Array(large + 1)))
    assert shared is not None
    assert shared.is_shared()
    assert len(data) < 3000
    assert shared.numel() > 2 * large.nbytes
    record = unpack((data, shared)).content["arrays"]
    assert isinstance(record, ArrayRecord)
    assert list(record) == ["a", "b", "c"]
    assert np.array_equal(record["a"].numpy(), large)
    assert np.array_equal(record["b"].numpy(), small)
    assert np.array_equal(record["c"].numpy(), large + 1)
    assert Packing().pack(sent(b=Array(small)))[1] is None


def test_what_goes_to_several_sites_is_shared_once(sent: Callable[..., Message]) -> None:
    packing, array = Packing(), Array(np.zeros(50_000, np.float32))
    first, again = packing.pack(sent(a=array))[1], packing.pack(sent(a=array))[1]
    other = packing.pack(sent(a=Array(np.ones(50_000, np.float32))))[1]
    assert first is again
    assert other is not first


def test_shared_memory_without_room_is_one_line() -> None:
    code = (
        "import resource\n"
        "from fedsilo.strategies.wire.parcels import _share\n"
        "from fedsilo.core.errors import FedsiloError\n"
        "assert len(_share([b'x' * 90_000])) == 90_000\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"  # as a full /dev/shm
        "try:\n    _share([b'x' * 200_000])\nexcept FedsiloError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "shared memory has no room for 200000 bytes of a message: make /dev/shm larger (docker run "
        "--shm-size=2g), or take --engine inline\n"
    )


class _Killing(process_engine.ProcessGrid):
    """A grid that kills the worker of a training message, so many times of one node.

    With ``fork_server`` the process from which workers are forked goes too.
    """

    node, times, killed, fork_server = 1002, 1, set[int](), False

    def _dispatch(self) -> None:
        super()._dispatch()
        for message, worker in self._running.values():
            told, process = message.metadata, worker.process.result()
            victim = told.message_type == "train" and told.dst_node_id == self.node
            if victim and process not in self.killed and type(self).times:
                type(self).times -= 1
                self.killed.add(process)
                os.kill(process, signal.SIGKILL)
                if self.fork_server:
                    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> type[_Killing]:
    """Return the grid that kills, in place of the usual one."""
    grid = type("Grid", (_Killing,), {})
    monkeypatch.setattr(process_engine, "ProcessGrid", grid)
    return grid


def _run(values: dict[str, Value], out: Path, nodes: int = 3) -> RunDirectory:
    named = values | {"run.name": "run", "run.out": str(out)}
    resources = {"num-supernodes": nodes, "init-args-num-cpus": 2}
    return run_with_processes(resolve(named), resources)


@pytest.mark.parametrize(
    ("variant", "times", "fork_server"),
    in_soak(
        [("uefl", 2, False), ("uefl", 1, True), ("fedavg-bf16", 2, False)],
        but=[("uefl", 2, False), ("fedavg-bf16", 2, False)],
    ),
)
def test_a_message_whose_worker_is_killed_is_answered_by_another(
    variant: str,
    times: int,
    fork_server: bool,
    killing: type[_Killing],
    tiny: Tiny,
    inline_run: InlineRun,
    tmp_path: Path,
) -> None:
    killing.times, killing.fork_server = times, fork_server
    values = tiny(str(VARIANTS[variant]["method"])) | VARIANTS[variant]
    directory = _run(values, tmp_path / "killed")
    assert killing.times == 0
    assert directory.read_json("summary.json")["failures"] == []
    assert _bytes(directory) == _bytes(inline_run(values))


def test_a_message_whose_worker_is_killed_thrice_counts_as_failed(
    killing: type[_Killing], tiny: Tiny, tmp_path: Path
) -> None:
    killing.times = 3
    with pytest.raises(SiteError) as caught:
        _run(tiny("fedavg"), tmp_path / "stops")
    assert str(caught.value).startswith(
        "site s2a, round 1, phase train: its process was killed 3 times while it answered, perhaps"
    )
    assert "\n" not in str(caught.value)
    killing.times = 3
    directory = _run(tiny("fedavg", min_sites=2), tmp_path / "goes-on")
    failures = directory.read_json("summary.json")["failures"]
    assert [failure["site"] for failure in failures] == ["s2a"]


def test_messages_that_nobody_waits_for_any_more_are_not_answered(
    sent: Callable[..., Message],
) -> None:
    grid = process_engine.ProcessGrid({}, [{}], [])  # without workers
    grid.push_messages([sent()])
    (key,) = grid.push_messages([sent()])
    assert list(grid._waiting) == [key]
    assert list(grid.pull_messages([key])) == []


@pytest.mark.parametrize(("ends", "starts"), [(0, True), (2, True), (3, False)])
def test_a_worker_starts_though_the_fork_server_ended_just_now(
    ends: int, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = iter([EOFError("unexpected EOF"), ConnectionRefusedError(), EOFError()][:ends])

    class Pool:
        def __init__(self, *_: object) -> None:
            pass

        def submit(self, _: object) -> Future[int]:
            if error := next(errors, None):
                raise error
            return Future()

    monkeypatch.setattr(process_engine, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(process_engine, "_PAUSES", (0.0, 0.0, 0.0))
    if starts:
        assert not process_engine.SiteProcess(({}, {}, [])).process.done()
        return
    with pytest.raises(ProcessError, match="cannot start a process"):
        process_engine.SiteProcess(({}, {}, []))


@pytest.mark.parametrize("by", in_soak([signal.SIGKILL, signal.SIGINT], but=[signal.SIGKILL]))
def test_processes_end_with_the_command_and_the_run_resumes(
    by: signal.Signals, tiny: Tiny, inline_run: InlineRun, tmp_path: Path
) -> None:
    values = tiny("fedavg", rounds=8)
    sets = [f"--set={key}={value}" for key, value in values.items()]
    command = [sys.executable, "-m", "fedsilo.cli", "simulate", "fedavg-digits", *sets]
    run = subprocess.Popen(
        [*command, "--engine", "processes", "--name", "run", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    limit = time.monotonic() + 120
    while not list(tmp_path.glob("run/checkpoints/*")) and time.monotonic() < limit:
        time.sleep(0.02)
    tree = psutil.Process(run.pid).children(recursive=True)
    assert len(tree) >= 3, "resource tracker, fork server, workers"
    run.send_signal(by)
    _, said = run.communicate(timeout=60)
    assert run.returncode == (130 if by == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in said, said
    limit = time.monotonic() + 10
    while any(map(runs, tree)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert [process for process in tree if runs(process)] == []
    resumed = _run(values | {"resume": True}, tmp_path)
    assert _bytes(resumed) == _bytes(inline_run(values, out=tmp_path / "whole"))


@pytest.mark.soak
def test_a_script_without_a_guard_runs_once(tiny: Tiny, tmp_path: Path) -> None:
    script = tmp_path / "study.py"
    values = {**tiny("fedavg", rounds=1), "run.name": "run", "run.out": str(tmp_path)}
    script.write_text(
        "print('the script')\n"
        "from fedsilo.server_app.config.settings import resolve\n"
        "from fedsilo.engines.process_engine import run_with_processes\n"
        f"run_with_processes(resolve({values!r}), {{'num-supernodes': 3}})\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the script") == 1
    assert done.stderr == ""


# --- In a worker, whose functions are called here ---


def test_a_worker_takes_the_environment_and_answers_for_every_site(
    sent: Callable[..., Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[object] = []

    class Watcher:
        def __init__(self, target: object, daemon: bool) -> None:
            threads.append((target, daemon))

        def start(self) -> None:
            pass

    grid = SimpleNamespace(answer=lambda message: message)
    monkeypatch.setattr(process_engine, "Thread", Watcher)
    monkeypatch.setattr(process_engine, "InlineGrid", lambda *given: grid)
    monkeypatch.setattr(process_engine, "flower_identity", nullcontext)
    monkeypatch.setattr(process_engine, "_site", None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(os, "environ", {"old": "1"})
    before = signal.getsignal(signal.SIGINT)
    try:
        process_engine._begin_worker({"new": "2"}, {}, [])
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert os.environ == {"new": "2"}
    assert threads == [(process_engine._end_with_command, True)]
    parcel = Packing().pack(sent(a=Array(np.arange(3, dtype=np.float32))))
    reply = unpack(process_engine._answer_parcel(parcel))
    record = reply.content["arrays"]
    assert isinstance(record, ArrayRecord)
    assert record["a"].numpy().tolist() == [0.0, 1.0, 2.0]


def test_a_worker_ends_when_its_command_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    command = SimpleNamespace(join=lambda: done.append("joined"))
    monkeypatch.setattr(process_engine, "parent_process", lambda: command)
    monkeypatch.setattr(os, "_exit", done.append)
    process_engine._end_with_command()
    assert done == ["joined", 1]


def test_a_machine_that_starts_no_process_is_told_after_three_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[object] = []

    class Pool:
        def __init__(self, *_: object) -> None:
            tried.append(self)

        def submit(self, work: object) -> None:
            raise EOFError

    monkeypatch.setattr(process_engine, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(process_engine, "_PAUSES", (0.0, 0.0, 0.0))
    with refuses(ProcessError, "--engine"):
        process_engine.SiteProcess(({}, {}, []))
    assert len(tried) == 3


def test_a_worker_that_was_killed_while_idle_is_started_again_for_the_next_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools: list[object] = []

    class Pool:
        def __init__(self, *_: object) -> None:
            pools.append(self)

        def submit(self, work: object, *given: object) -> object:
            if given and len(pools) == 1:
                raise BrokenProcessPool
            return given

    monkeypatch.setattr(process_engine, "ProcessPoolExecutor", Pool)
    worker = process_engine.SiteProcess(({}, {}, []))
    parcel = b"message", None
    assert worker.submit(parcel) == (parcel,)
    assert len(pools) == 2
