"""Deploying from Python: who starts a run on a deployment draws its pictures."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.api import deploying
from fedsilo.deployment import deployed_run as deployed
from fedsilo.deployment import joining


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


def test_a_plan_says_what_a_run_would_do_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = SimpleNamespace(method="fedavg", dataset="heart", rounds=3, seed=7)
    planned: Any = (SimpleNamespace(sites=["north"]), SimpleNamespace(common=common), tmp_path)
    monkeypatch.setattr(deployed, "plan", lambda *_, **__: planned)
    lines = list(deploying.plan_deployed_run("fedavg-heart", deployment=tmp_path, seed=7))
    assert lines[0] == "plan: fedavg on heart, 3 rounds, seed 7"
    assert "north" in lines[1]
    assert lines[2] == f"would write: {tmp_path}"
    planned[0].sites.clear()
    assert "none" in list(deploying.plan_deployed_run("fedavg-heart"))[1]


def test_a_revoked_hospital_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    revoked: list[str] = []
    monkeypatch.setattr(joining, "revoke", lambda folder, member, tell: revoked.append(member))
    assert deploying.revoke("north") == "north is revoked"
    assert revoked == ["north"]
