"""The guard with small processes in place of SuperLink; what Ray is told of a running cluster."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from fedsilo.core.errors import ProcessError, SettingError
from fedsilo.core.processes import RUN_MARK, end_run, free_ports, runs
from fedsilo.core.settings_schema import Value
from fedsilo.engines import ray_engine
from fedsilo.engines.ray_engine import check_cluster, ray_variables, unused_cluster
from fedsilo.server_app.config.settings import RunSettings, resolve
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.errors import refuses

# Starts a child in a session of its own that loses its parent, as Ray's do; says both ids
FAMILY = """
import os, subprocess, sys, time
inner = (
    "import os, subprocess, sys, time;"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
    " start_new_session=True);"
    "print(p.pid, flush=True)"
)
subprocess.run([sys.executable, "-c", inner])
print(os.getpid(), flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(7)
"""
Guard = subprocess.Popen[str]
Start = Callable[..., tuple[Guard, list[psutil.Process]]]


def all_ended(processes: list[psutil.Process], seconds: float = 20.0) -> bool:
    limit = time.monotonic() + seconds
    while any(map(runs, processes)) and time.monotonic() < limit:
        time.sleep(0.05)
    return not any(map(runs, processes))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "flwr-home"
    folder.mkdir()
    (folder / "kept").write_text("log")
    yield folder
    end_run(folder)


@pytest.fixture
def start(home: Path) -> Start:
    """Return a starter of a guard; it gives the guard, the command and the command's orphan."""

    def started(seconds: str = "600") -> tuple[Guard, list[psutil.Process]]:
        command = [sys.executable, "-c", FAMILY, seconds]
        guard = subprocess.Popen(
            [sys.executable, "-m", "fedsilo.engines.ray_engine", str(home), *command],
            env=os.environ | {RUN_MARK: str(home)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert guard.stdout is not None
        orphan, main = (psutil.Process(int(guard.stdout.readline())) for _ in range(2))
        assert orphan.ppid() not in (guard.pid, main.pid), "it is in no tree of the guard's"
        return guard, [main, orphan]

    return started


def test_when_the_pipe_ends_everything_of_the_run_ends_and_its_folder_goes(
    start: Start, home: Path
) -> None:
    guard, family = start()
    assert guard.stdin is not None
    guard.stdin.close()
    assert guard.wait(20) == 0
    assert all_ended(family, 0)
    assert not home.exists()


def test_a_killed_starter_is_an_end_of_the_pipe(home: Path) -> None:
    guarded = [
        sys.executable,
        "-m",
        "fedsilo.engines.ray_engine",
        str(home),
        sys.executable,
        "-c",
    ]
    starter = (
        f"import os, subprocess, time\n"
        f"p = subprocess.Popen({[*guarded, 'import time; time.sleep(600)']!r},"
        f" env=os.environ | {{{RUN_MARK!r}: {str(home)!r}}}, stdin=subprocess.PIPE,"
        f" start_new_session=True)\n"
        f"print(p.pid, flush=True)\n"
        f"time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    guard = psutil.Process(int(process.stdout.readline()))
    limit = time.monotonic() + 20
    while not guard.children() and time.monotonic() < limit:
        time.sleep(0.05)
    family = [guard, *guard.children()]
    assert len(family) == 2
    process.kill()
    assert all_ended(family)
    assert not home.exists()
    process.wait()


def test_a_command_that_ends_by_itself_gives_its_code_and_leaves_the_log(
    start: Start, home: Path
) -> None:
    guard, family = start("0.1")
    assert guard.wait(20) == 7
    assert all_ended(family, 0)
    assert (home / "kept").read_text() == "log"


def test_a_guard_that_is_told_to_end_ends_the_run_first(start: Start, home: Path) -> None:
    guard, family = start()
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(20) == 128 + signal.SIGTERM
    assert all_ended(family, 0)


def test_end_run_leaves_the_processes_of_other_runs(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    one, other = (
        subprocess.Popen(sleep, env=os.environ | {RUN_MARK: home}, stdout=subprocess.PIPE)
        for home in (str(tmp_path / "run"), str(tmp_path / "run-2"))
    )
    try:
        for process in (one, other):
            assert process.stdout is not None
            process.stdout.readline()
        end_run(tmp_path / "run")
        assert one.poll() is not None or not runs(psutil.Process(one.pid))
        assert other.poll() is None
    finally:
        one.kill()
        other.kill()
        one.wait()
        other.wait()


# --- A running Ray cluster ---


@pytest.mark.parametrize("address", ["here:no", "auto"])
def test_an_address_that_ray_does_not_take_is_told_in_its_own_words(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SettingError, match=f"Ray cluster at {address} cannot be used: .*Error"):
        check_cluster(address, {})


def test_a_cluster_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "_CONNECT_LIMIT", 0.5)
    (port,) = free_ports(1)
    with pytest.raises(SettingError, match=r"it did not answer within 0\.5 s") as told:
        check_cluster(f"127.0.0.1:{port}", {})
    assert "\n" not in str(told.value)


def test_resources_of_a_cluster_of_ones_own_are_refused() -> None:
    with pytest.raises(SettingError, match="resource 'init-args-num-cpus' is for a cluster that"):
        check_cluster("auto", {"init-args-num-cpus": 4})


def test_without_an_address_ray_starts_a_cluster_of_its_own() -> None:
    assert ray_variables("", {"FEDSILO_DATA": "/d"}) == {"RAY_ADDRESS": "local"}
    assert unused_cluster({}) is unused_cluster({"RAY_ADDRESS": "local"}) is None
    told = unused_cluster({"RAY_ADDRESS": "10.0.0.1:6379"})
    assert told is not None
    assert "10.0.0.1:6379, but this run does not use it" in told


def test_what_sites_read_of_the_environment_travels() -> None:
    environment = {"FEDSILO_DATA": "/d", "OMP_NUM_THREADS": "1", "HOME": "/root", "PATH": "/bin"}
    told = ray_variables("10.0.0.0:6379", environment)
    assert told["RAY_ADDRESS"] == "10.0.0.0:6379"
    travelling = json.loads(told["RAY_JOB_CONFIG_JSON"])["runtime_env"]["env_vars"]
    assert travelling == {"FEDSILO_DATA": "/d", "OMP_NUM_THREADS": "1"}


# --- A run, whose SuperLink and commands are played ---


@pytest.fixture
def settings(tmp_path: Path) -> RunSettings:
    return resolve({"run.out": str(tmp_path), "run.name": "r", "method": "fedavg"})


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Play a SuperLink and ``flwr run``; a test says how the run ends. Return the run's error."""
    errors = [""]

    @contextmanager
    def superlink(home: Path, variables: object, address: str) -> Iterator[dict[str, str]]:
        assert (home / "run-config.toml").is_file()
        yield {}

    def flwr_run(*given: object) -> str:
        if errors[0] == "interrupt":
            raise KeyboardInterrupt
        return errors[0]

    monkeypatch.setattr(ray_engine, "_superlink", superlink)
    monkeypatch.setattr(ray_engine, "_flwr_run", flwr_run)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "r").mkdir()
    return errors


def test_a_run_that_ends_without_a_summary_has_failed(
    settings: RunSettings, played: list[str], tmp_path: Path
) -> None:
    with refuses(ProcessError, tmp_path / "r"):
        ray_engine.run_with_ray(settings, {})
    played[0] = "site north: 'batch-size' is 0"
    with pytest.raises(ProcessError, match=played[0]):
        ray_engine.run_with_ray(settings, {})
    played[0] = ""
    (tmp_path / "r" / "summary.json").touch()
    assert ray_engine.run_with_ray(settings, {}).path == tmp_path / "r"


def test_an_interrupt_names_a_run_that_has_begun(
    settings: RunSettings, played: list[str], tmp_path: Path
) -> None:
    played[0] = "interrupt"
    with pytest.raises(KeyboardInterrupt) as unbegun:
        ray_engine.run_with_ray(settings, {})
    (tmp_path / "r" / "config.toml").touch()
    with pytest.raises(KeyboardInterrupt) as begun:
        ray_engine.run_with_ray(settings, {})
    assert (unbegun.value.args, begun.value.args) == ((), (str(tmp_path / "r"),))


def test_a_cluster_is_used_only_if_its_address_is_given(
    settings: RunSettings,
    played: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "r" / "summary.json").touch()
    monkeypatch.setattr(ray_engine, "unused_cluster", lambda: "RAY_ADDRESS is not used")
    checked: list[str] = []
    monkeypatch.setattr(ray_engine, "check_cluster", lambda address, _: checked.append(address))
    ray_engine.run_with_ray(settings, {}, "10.0.0.1:6379")
    assert (checked, capsys.readouterr().err) == (["10.0.0.1:6379"], "")
    ray_engine.run_with_ray(settings, {})
    assert (len(checked), capsys.readouterr().err) == (1, "fedsilo: RAY_ADDRESS is not used\n")


def test_a_superlink_that_does_not_start_is_told_by_its_log_or_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text("port\nis taken")
    (port,) = map(str, free_ports(1))
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(ProcessError, match="ended at its start: port is taken"):
        ray_engine._wait_until_healthy(ended, port, log)
    monkeypatch.setattr(ray_engine, "_START_LIMIT", 0.1)
    with subprocess.Popen(["sleep", "60"]) as silent:
        with pytest.raises(ProcessError, match="did not start within 0 s"):
            ray_engine._wait_until_healthy(silent, port, log)
        silent.kill()


PRINTED = """
INFO :      Starting Flower
WARNING :   little memory
ERROR :     fedsilo: 'rounds' must be at least 1
ERROR :     Traceback of Flower's own
"""


@pytest.mark.parametrize(
    ("verbose", "shown"),
    [("", ["WARNING :   little memory"]), ("1", PRINTED.splitlines())],
)
def test_a_commands_routine_lines_and_those_after_the_error_are_shown_only_on_request(
    verbose: str,
    shown: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FEDSILO_VERBOSE", verbose)
    command = ["sh", "-c", "printf '%s' \"$0\"; exit 3", PRINTED]
    error, code = ray_engine.stream(command, os.environ, Console(width=200))
    assert (error, code) == ("'rounds' must be at least 1", 3)
    assert capsys.readouterr().out.splitlines() == shown


def test_a_failed_command_without_an_error_line_is_told_by_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def stream(command: list[str], *_: object) -> tuple[str, int]:
        asked.append(command)
        return "", 4

    monkeypatch.setattr(ray_engine, "stream", stream)
    resources: dict[str, Value] = {"num-supernodes": 2, "init-args-num-cpus": 0}
    directory = RunDirectory(tmp_path)
    told = ray_engine._flwr_run(tmp_path, tmp_path / "c", resources, {}, directory)
    assert "exit code 4" in told
    assert asked[0][-1] == "num-supernodes=2"  # Ray counts the cores itself


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ray_engine._ENDINGS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_guard_gives_the_commands_code_or_removes_the_folder_when_its_starter_ends(
    home: Path, handlers: None
) -> None:
    read, write = os.pipe()
    assert ray_engine.guard(home, ["sh", "-c", "exit 7"], read) == 7
    assert (home / "kept").is_file()
    os.close(write)
    command = ["env", f"{RUN_MARK}={home}", "sleep", "60"]
    assert ray_engine.guard(home, command, read) == 0
    assert not home.exists()
    os.close(read)


def test_a_guard_ends_the_run_when_it_is_told_to_end(home: Path, handlers: None) -> None:
    read, write = os.pipe()
    # The command itself sends the signal, when the guard's handlers are set
    script = "kill -HUP $PPID; exec sleep 60"
    with pytest.raises(SystemExit) as ended:
        ray_engine.guard(home, ["env", f"{RUN_MARK}={home}", "sh", "-c", script], read)
    assert ended.value.code == 128 + signal.SIGHUP
    os.close(read)
    os.close(write)
