"""A run watched while a hospital is killed and comes back, and while a watcher is killed."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsilo.cli.main import main
from fedsilo.core.processes import app_folder
from fedsilo.core.settings_schema import Value
from fedsilo.deployment.deployment import read_deployment
from fedsilo.reports.watch.view import View, look_at_deployment
from fedsilo.server_app.records.progress import Progress
from fedsilo.server_app.records.run_directory import RunDirectory
from tests.support.bound_command import COMMAND
from tests.support.deployed import kill

SITES = 3
_LIMIT = 600.0


def _until(folder: Path, seen: Callable[[Progress], bool]) -> View:
    """Return the first view of the deployment's newest run in which that is seen."""
    limit = time.monotonic() + _LIMIT
    while True:
        view = look_at_deployment(folder)
        if view.run and seen(view.run.progress):
            return view
        assert time.monotonic() < limit, view.line()
        assert not (view.run and view.run.over), view.line()
        time.sleep(0.1)


def test_a_hospital_that_is_killed_and_comes_back_is_seen_to(
    folder: Path,
    begin: Callable[..., subprocess.Popen[str]],
    tiny: Callable[..., dict[str, Value]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    deployment = read_deployment(folder)
    site, *others = deployment.sites
    # shorter than the restart below takes, so that the round goes on without the site
    few = {"silos": SITES, "min_sites": 2, "reply_timeout": 240.0, "away_timeout": 2.0}
    process = begin(tiny("fedavg", rounds=10, **few), "watched")
    _until(folder, lambda progress: progress.finished_rounds >= 1)
    watcher = subprocess.Popen(
        [*COMMAND, "watch", "--deployment", str(folder)],
        cwd=app_folder(),
        stdout=subprocess.DEVNULL,
    )
    kill(deployment, site)
    watcher.kill()
    watcher.wait()
    gone = _until(folder, lambda progress: site in progress.away)
    assert f"away: {site}" in gone.line()
    assert gone.line().endswith(f"down: {site}")
    assert dict(gone.members)[site] is False
    assert main(["deploy", "up", "--deployment", str(folder)]) == 0
    back = _until(folder, lambda progress: site in progress.answered)
    assert back.run is not None
    assert back.run.progress.left_out >= 1
    assert dict(back.members)[site] is True
    printed, _ = process.communicate(timeout=_LIMIT)
    assert process.returncode == 0, printed
    run = look_at_deployment(folder).run
    assert run is not None
    assert (run.progress.state, run.progress.finished_rounds) == ("finished", 10)
    summary = RunDirectory(run.folder).read_json("summary.json")
    assert {failure["site"] for failure in summary["failures"]} == {site}
    assert run.progress.bytes() == summary["bytes"]
    assert sorted(run.progress.sites) == [site, *others]
    capsys.readouterr()
    assert main(["deploy", "status", "--deployment", str(folder)]) == 0
    assert "watched: finished, round 10 of 10" in capsys.readouterr().out
