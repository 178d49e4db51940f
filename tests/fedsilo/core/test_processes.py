"""Processes of a run: where their commands are, whether they run, and with whom they end."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from fedsilo.core import processes
from fedsilo.core.errors import ProcessError
from fedsilo.core.processes import app_folder, end_with, process_of, runs, tool
from tests.support.errors import refuses


def ended_within(pid: int, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while psutil.pid_exists(pid) and runs(psutil.Process(pid)) and time.monotonic() < limit:
        time.sleep(0.05)
    return not psutil.pid_exists(pid) or not runs(psutil.Process(pid))


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1"])
def test_a_bound_process_ends_with_its_killed_parent_and_cleans_up_if_the_signal_lets_it(
    tmp_path: Path, number: str
) -> None:
    child = (
        "import os, signal, sys, time\n"
        "from fedsilo.core.processes import end_with\n"
        f"open({str(tmp_path / 'file')!r}, 'w')\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1))\n"
        f"end_with(os.getppid(), signal.{number})\n"
        "try:\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(600)\n"
        "finally:\n"
        f"    os.unlink({str(tmp_path / 'file')!r})\n"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert not ended_within(pid, 0.3), "its parent is there"
    process.kill()
    process.wait()
    assert ended_within(pid, 15)
    assert (tmp_path / "file").exists() == (number == "SIGTERM")


def test_a_process_that_does_not_heed_the_signal_is_ended_all_the_same() -> None:
    child = (
        "import os, signal, time\n"
        "from fedsilo.core import processes\n"
        "processes._UNWINDING = 0.2\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "processes.end_with(os.getppid(), signal.SIGTERM)\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    assert ended_within(pid, 15)


def test_a_command_beside_this_python_comes_before_one_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert tool("true") == shutil.which("true")
    (tmp_path / "true").touch()
    assert tool("true") == str(tmp_path / "true")
    with refuses(ProcessError, "'no-such-command'", tmp_path / "python"):
        tool("no-such-command")


def test_flowers_engines_need_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "installed_folder", lambda: tmp_path)
    with refuses(ProcessError, tmp_path, "pyproject.toml"):
        app_folder()
    (tmp_path / "pyproject.toml").touch()
    assert app_folder() == tmp_path


def test_a_process_is_known_by_its_id_and_its_start() -> None:
    own = psutil.Process()
    assert process_of(own.pid, own.create_time()) == own
    assert process_of(own.pid, own.create_time() - 60) is None, "the id was another one's"
    ended = subprocess.Popen(["true"])
    started = psutil.Process(ended.pid).create_time()
    while runs(psutil.Process(ended.pid)):
        time.sleep(0.01)
    assert process_of(ended.pid, started) is None, "a zombie has ended"
    gone = psutil.Process(ended.pid)
    ended.wait()
    assert not runs(gone)
    assert process_of(ended.pid, started) is None


@pytest.mark.parametrize("by", [None, signal.SIGUSR1])
def test_this_process_ends_after_the_one_that_it_is_bound_to(
    by: signal.Signals | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    ended = threading.Event()

    def end(code: int) -> None:
        done.append(f"exit {code}")
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(processes, "_EVERY", 0.01)
    monkeypatch.setattr(processes, "_UNWINDING", 0.01)
    before = signal.signal(signal.SIGUSR1, lambda *_: done.append("signal"))
    try:
        with subprocess.Popen(["sleep", "60"]) as other:
            end_with(other.pid, by)
            assert not ended.wait(0.05), "it is there"
            other.kill()
        assert ended.wait(60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sorted(done) == (["exit 1", "signal"] if by else ["exit 1"])


def test_a_process_bound_to_one_that_has_ended_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(SystemExit) as ended:
        end_with(gone.pid)
    assert ended.value.code == 1
