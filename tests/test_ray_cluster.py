"""A run over several raylets, for real: the same bytes, and going on after a node was killed."""

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

from fedsilo.core.processes import end_trees, free_ports, tool
from fedsilo.core.settings_schema import Value
from fedsilo.server_app.records.run_directory import RunDirectory

Tiny = Callable[..., dict[str, Value]]
InlineRun = Callable[..., RunDirectory]
pytestmark = pytest.mark.soak


class Raylets:
    """A head and two workers of one CPU each, on this machine."""

    def __init__(self, temporary: str) -> None:
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self._before = {process.pid for process in psutil.process_iter()}
        self._start("--head", f"--port={port}", f"--temp-dir={temporary}", "--num-cpus=1")
        self.workers = [self._worker(), self._worker()]

    def _start(self, *arguments: str) -> None:
        command = [tool("ray"), "start", *arguments, "--disable-usage-stats"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)

    def _worker(self) -> psutil.Process:
        known = set(self._raylets())
        self._start(f"--address={self.address}", "--num-cpus=1")
        (new,) = set(self._raylets()) - known
        return new

    def _raylets(self) -> list[psutil.Process]:
        return [process for process in self.processes() if process.name() == "raylet"]

    def processes(self) -> list[psutil.Process]:
        started = [p for p in psutil.process_iter() if p.pid not in self._before]
        return [p for p in started if any("ray" in part for part in p.cmdline()[:3])]

    def end(self) -> None:
        end_trees(self.processes())


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as temporary:
        cluster = Raylets(temporary)
        try:
            yield cluster
        finally:
            cluster.end()


def _command(values: dict[str, Value], out: Path, address: str) -> list[str]:
    sets = [f"--set={key}={json.dumps(value)}" for key, value in values.items()]
    told = ["--name", "run", "--out", str(out), "--ray-address", address]
    return [
        sys.executable,
        "-m",
        "fedsilo.cli",
        "simulate",
        "fedavg-digits",
        *sets,
        *told,
    ]


def _same(one: Path, other: RunDirectory) -> None:
    for name in ("metrics.csv", "model.safetensors"):
        assert (one / "run" / name).read_bytes() == (other.path / name).read_bytes()


def test_a_run_over_three_raylets_has_the_bytes_of_one(
    tiny: Tiny, inline_run: InlineRun, raylets: Raylets, tmp_path: Path
) -> None:
    values = tiny("fedavg")
    done = subprocess.run(
        _command(values, tmp_path / "ray", raylets.address),
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 nodes and 3 CPUs of the Ray cluster at" in done.stderr
    _same(tmp_path / "ray", inline_run(values))
    assert [path.name for path in (tmp_path / "ray").iterdir()] == ["run"]


def test_a_run_whose_node_was_killed_goes_on(
    tiny: Tiny, inline_run: InlineRun, raylets: Raylets, tmp_path: Path
) -> None:
    values, out = tiny("fedavg", rounds=8), tmp_path / "ray"
    run = subprocess.Popen(
        _command(values, out, raylets.address),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    limit = time.monotonic() + 300
    while not list(out.glob("run/checkpoints/*")) and run.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.05)
    raylets.workers[0].send_signal(signal.SIGKILL)
    _, said = run.communicate(timeout=300)
    if run.returncode:  # a site was at work on that node
        assert "fedsilo: error" in said.strip().splitlines()[-1]
        resume = [sys.executable, "-m", "fedsilo.cli", "resume", str(out / "run")]
        again = [*resume, "--ray-address", raylets.address]
        done = subprocess.run(again, capture_output=True, text=True, check=False, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
    _same(out, inline_run(values))
