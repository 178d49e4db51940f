"""Hospitals that count as they come: the order on record gives the bytes, after a kill too."""

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import fedsilo.server_app.run.beginning
from fedsilo.models.contract.settings_schema import Value
from fedsilo.server_app.cli.main import main
from fedsilo.server_app.deploy.deployment import SERVER, read_deployment
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.deployed import kill

SITES = 3
LIMIT = 200.0  # seconds until a run has ended

Begin = Callable[..., subprocess.Popen[str]]


def until(path: Path, round_: int) -> None:
    """Wait until ``arrivals.csv`` has a round."""
    limit = time.monotonic() + LIMIT
    while not (path.is_file() and f"\n{round_}," in path.read_text()):
        assert time.monotonic() < limit, f"round {round_} has not come"
        time.sleep(0.1)


def test_a_run_with_a_late_hospital_and_a_killed_server_has_the_bytes_of_its_order(
    folder: Path,
    begin: Begin,
    tiny: Callable[..., dict[str, Value]],
    inline_run: Callable[..., RunDirectory],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    deployment = read_deployment(folder)
    values = tiny("fedavg", silos=SITES, rounds=6)
    values |= {"round-quorum": 0.6, "late-replies": "discounted", "away-timeout": 60.0}
    run = RunDirectory(deployment.runs / "quorum")
    process = begin(values, "quorum")
    until(run.path / "arrivals.csv", 1)
    slow = deployment.process(deployment.sites[-1])
    assert slow
    members: list[psutil.Process] = [slow, *slow.children(recursive=True)]
    for member in members:
        member.suspend()
    until(run.path / "arrivals.csv", 3)
    kill(deployment, SERVER)
    for member in members:
        if member.is_running():
            member.resume()
    process.communicate(timeout=LIMIT)
    before = (run.path / "arrivals.csv").read_text()
    assert main(["deploy", "up", "--deployment", str(folder)]) == 0
    again = begin(values, "quorum", "--set", "resume=true")
    said, _ = again.communicate(timeout=LIMIT)
    assert again.returncode == 0, said
    after = (run.path / "arrivals.csv").read_text()
    assert after.startswith(before[: before.rindex("\n") + 1])
    copy = tmp_path / "run"
    copy.mkdir()
    shutil.copy(run.path / "arrivals.csv", copy)
    monkeypatch.setattr(fedsilo.server_app.run.beginning, "seconds_of", lambda *_: {})
    replayed = inline_run(values | {"resume": True}, SITES)
    assert replayed.path == copy
    for file in ("model.safetensors", "metrics.csv", "arrivals.csv"):
        assert (run.path / file).read_bytes() == (replayed.path / file).read_bytes(), file
