"""What a run leaves behind when it is killed: no process, no temporary folder."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fedsilo.core.processes import RUN_MARK, end_run, end_trees, runs
from fedsilo.core.settings_schema import Value

Tiny = Callable[..., dict[str, Value]]
Begin = Callable[..., subprocess.Popen[bytes]]
START, END = 240.0, 30.0  # seconds, at most: on a machine that has other work
ENDLESS = (
    *(
        "dataset=heart-synthetic",
        "method=local",
        "rounds=1000000",
        "train.local-steps=1",
        "dropout=0",
    ),
    *("train.mc-passes=0", "device=cpu", "server.evaluate-every=0"),
)
TRIALS = """
import sys
from pathlib import Path
from fedsilo.comparison.trials import Trial, run_trials
from fedsilo.server_app.config.settings import parse_assignment, resolve
values = dict(parse_assignment(text) for text in sys.argv[2:])
trials = [Trial(resolve(values | {"seed": seed}), {"seed": seed}, "data") for seed in (1, 2)]
if __name__ == "__main__":
    run_trials(trials, Path(sys.argv[1]), 2)
"""


def wait_for(true: Callable[[], object], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < limit:
        time.sleep(0.1)
    return bool(found)


def begins(process: subprocess.Popen[bytes], true: Callable[[], object]) -> bool:
    """Wait until something is true of a process; not if it ends before."""
    return wait_for(lambda: true() or process.poll() is not None, START) and process.poll() is None


def marks(process: psutil.Process) -> str:
    try:
        return process.environ().get(RUN_MARK, "")
    except psutil.Error:
        return ""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Return a folder of temporary files whose name is short: Ray's sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="left-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def begin(tmp_path: Path, temporary: Path) -> Iterator[Begin]:
    """Return a starter of a Python process with that folder of temporary files."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "said").open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=os.environ | {"TMPDIR": str(temporary)},
                stdout=said,
                stderr=said,
            )
        started.append(process)
        return process

    yield start
    end_trees([psutil.Process(process.pid) for process in started if process.poll() is None])


@pytest.mark.soak
def test_a_killed_ray_run_leaves_no_process_and_no_folder(
    tiny: Tiny, begin: Begin, tmp_path: Path
) -> None:
    values = tiny("fedavg", rounds=4000)
    sets = [f"--set={key}={json.dumps(value)}" for key, value in values.items()]
    told = ("--name", "run", "--out", str(tmp_path / "runs"))
    run = begin("-m", "fedsilo.cli", "simulate", "fedavg-digits", *sets, *told)
    trains = begins(run, lambda: list(tmp_path.glob("runs/run/checkpoints/*")))
    assert trains, (tmp_path / "said").read_text()
    tree = psutil.Process(run.pid).children(recursive=True)
    homes = {Path(mark) for mark in map(marks, tree) if mark}
    try:
        assert len(tree) >= 6, "flwr, SuperLink, SuperExec, simulation, Ray, its workers"
        assert len(homes) == 1
        assert all(map(marks, tree)), "Ray's titles of processes do not cover the mark"
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert wait_for(lambda: not any(map(runs, tree)), END), [p for p in tree if runs(p)]
        marked = [p for p in psutil.process_iter() if Path(marks(p)) in homes]
        assert marked == []
        assert wait_for(lambda: not any(home.exists() for home in homes), 5)
    finally:
        run.kill()
        for home in homes:
            end_run(home)


@pytest.mark.soak  # the runs of a killed comparison, below, are trials as well
def test_killed_trials_end_with_their_command_and_remove_their_folders(
    begin: Begin, temporary: Path, tmp_path: Path
) -> None:
    script = tmp_path / "trials.py"
    script.write_text(TRIALS)
    command = begin(str(script), str(tmp_path / "trials"), *ENDLESS)

    def both_train() -> bool:
        return len(list(temporary.glob("fedsilo-trial-*/trial/config.toml"))) == 2

    assert begins(command, both_train)
    tree = psutil.Process(command.pid).children(recursive=True)
    assert len(tree) >= 2
    command.kill()
    command.wait()
    assert wait_for(lambda: not any(map(runs, tree)), END)
    assert list(temporary.glob("fedsilo-trial-*")) == []


@pytest.mark.soak
def test_the_runs_of_a_killed_comparison_end_with_it(begin: Begin, tmp_path: Path) -> None:
    file = tmp_path / "simulation.yaml"
    config = dict(text.split("=") for text in ENDLESS)
    values = {key: json.loads(v) if v.isdigit() else v for key, v in config.items()}
    file.write_text(json.dumps({"experiments": {"endless": {"config": values}}}))
    told = ("--file", str(file), "--seeds", "2", "--jobs", "2", "--out", str(tmp_path / "runs"))
    command = begin("-m", "fedsilo.cli", "compare", "endless", *told)
    assert begins(command, lambda: len(list(tmp_path.glob("runs/*/config.toml"))) == 2)
    tree = psutil.Process(command.pid).children(recursive=True)
    assert len(tree) >= 2
    command.kill()
    command.wait()
    assert wait_for(lambda: not any(map(runs, tree)), END)
