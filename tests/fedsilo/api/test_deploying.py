"""Deploying from Python: who starts a run on a deployment draws its pictures."""

import shutil
from pathlib import Path

import pytest

from fedsilo.api import deploying
from fedsilo.deployment import deployed_run as deployed


def test_the_command_that_ran_an_experiment_draws_its_pictures(
    hearts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server of the deployment has left the run's own numbers, and no picture
    folder = shutil.copytree(
        hearts / "fedavg-seed0", tmp_path / "run", ignore=shutil.ignore_patterns("*.png")
    )
    monkeypatch.setattr(deployed, "run", lambda *_, **__: folder)
    assert deploying.run("fedavg-heart", deployment=tmp_path, tell=pytest.fail) == folder
    assert {path.name for path in folder.glob("*.png")} >= {"curves.png", "distribution.png"}
