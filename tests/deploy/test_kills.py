"""A server or hospital killed at moments drawn by a seed: the run resumes to the same bytes.

    make test-kill KILLS=200

One in twenty of the kills is of a deployment; ``FEDSILO_KILL=3`` repeats trial 3.
"""

import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsilo.cli.main import main
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import SERVER, read_deployment
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.deployed import kill

ALWAYS, SITES = True, 2
KILLS = int(os.environ.get("FEDSILO_KILLS", "0")) // 20
ONLY = os.environ.get("FEDSILO_KILL", "")
TRIALS = [int(ONLY)] if ONLY else list(range(KILLS))
pytestmark = pytest.mark.skipif(not TRIALS, reason="set FEDSILO_KILLS: make test-kill")
METHODS = ("fedavg", "uefl", "fedevprompt")
LIMIT = 240.0  # seconds until a run has ended, whatever became of it

Begin = Callable[..., subprocess.Popen[str]]


@pytest.mark.parametrize("trial", TRIALS)
def test_a_deployed_run_whose_server_or_hospital_was_killed_ends_alike(
    trial: int,
    folder: Path,
    begin: Begin,
    tiny: Callable[..., dict[str, Value]],
    inline_run: Callable[..., RunDirectory],
) -> None:
    draw, deployment, name = random.Random(trial), read_deployment(folder), f"kill-{trial}"
    values = tiny(draw.choice(METHODS), silos=SITES, rounds=3)
    values |= {"run.reply-timeout": 40.0, "run.away-timeout": 40.0}  # at a hello it is five minutes
    member = draw.choice([SERVER, *deployment.sites])
    after = draw.uniform(0, 30)
    process = begin(values, name)
    try:
        process.wait(after)
    except subprocess.TimeoutExpired:
        kill(deployment, member)
    process.communicate(timeout=LIMIT)
    assert main(["deploy", "up", "--deployment", str(folder)]) == 0
    run, told = RunDirectory(deployment.runs / name), f"trial {trial}: {member} after {after:.1f} s"
    if process.returncode or not (run.path / "summary.json").is_file():
        more = ("--set", "run.resume=true") if run.path.is_dir() else ()
        again = begin(values, name, *more)
        said, _ = again.communicate(timeout=LIMIT)
        assert again.returncode == 0, f"{told}\n{said}"
    simulated = inline_run(values, SITES)
    for file in ("metrics.csv", "model.safetensors"):
        assert (run.path / file).read_bytes() == (simulated.path / file).read_bytes(), told
    hidden = {path.name for path in run.path.rglob(".*") if path.is_file()}
    assert hidden == {".lock"}, f"{told}: half-written"
    now = read_deployment(folder)
    assert all(now.process(one) for one in (SERVER, *now.sites)), told
