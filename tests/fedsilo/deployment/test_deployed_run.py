"""A run on a deployment whose ``flwr`` command is played: its plan, its end, and how it resumes."""

import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.core.arguments import RunSources
from fedsilo.deployment import deployed_run, flower_commands
from fedsilo.deployment.deployed_run import meet, run
from fedsilo.deployment.deployment import Deployment, DeploymentError, plan
from fedsilo.server_app.config.settings import RunSettings, resolve
from fedsilo.server_app.run.meeting import Meeting, meeting_file
from tests.support.errors import refuses

SITES = ["s1a", "s2a"]


def _read(config: Path) -> RunSettings:
    """Read a run config as Flower does, which joins the names of tables and keys by dots."""
    values = {}
    for key, value in tomllib.loads(config.read_text()).items():
        if isinstance(value, dict):
            values |= {f"{key}.{name}": own for name, own in value.items()}
        else:
            values[key] = value
    return resolve(values)


class FakeFlower:
    """Answers ``flwr run`` and ``flwr list``; it remembers the settings of the run."""

    def __init__(self) -> None:
        self.statuses = [("running", ""), ("finished:completed", "N/A")]
        self.settings: RunSettings | None = None
        self.meeting: Meeting | None = None

    def flwr(self, deployment: Deployment, *words: str, say: object = None) -> dict[str, Any]:
        if words[0] == "run":
            self.settings = _read(Path(words[-1]))
            if self.meeting:
                path = meeting_file(self.settings.common)
                path.write_text(json.dumps(asdict(self.meeting)))
            return {"run-id": 17}
        assert words[-1] == "17"
        if not self.statuses:
            raise DeploymentError("no answer")
        status, details = self.statuses.pop(0)
        return {"runs": [{"status": status, "status-details": details}]}


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> FakeFlower:
    """Put a command in the place of Flower's; all members run and are online."""
    fake = FakeFlower()
    monkeypatch.setattr(deployed_run, "flwr", fake.flwr)
    monkeypatch.setattr(deployed_run, "stream", lambda *_: ("", 0))
    monkeypatch.setattr(deployed_run, "list_missing_sites", lambda _: [])
    monkeypatch.setattr(deployed_run.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(Deployment, "process", lambda self, member: SimpleNamespace(pid=7))
    return fake


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    made = plan(tmp_path / "d", SITES, [8000, 9092, 9101, 9102], {})
    made.home("server").mkdir(parents=True)
    made.write()
    return made


def _run(deployment: Deployment, **options: Any) -> Path:
    printed: list[str] = []
    sources = RunSources(changes=("split.silos=2",))
    return run("fedavg", deployment.folder, sources, printed.append, name="r", **options)


def test_a_run_is_started_with_its_settings_and_awaited(
    flower: FakeFlower, deployment: Deployment
) -> None:
    assert _run(deployment, seed=3, overrides={"rounds": 2}) == deployment.runs / "r"
    assert flower.settings
    common = flower.settings.common
    assert (common.seed, common.rounds, common.run_name, common.silos) == (3, 2, "r", 2)
    assert not flower.statuses, "it was asked until the run had ended"


def test_a_failed_run_gives_the_apps_error_and_the_command_that_resumes_it(
    flower: FakeFlower, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    flower.statuses = [("finished:failed", "site s1a left")]
    with pytest.raises(DeploymentError, match=r"finished:failed \(site s1a left\)") as unbegun:
        _run(deployment)
    assert "fedsilo deploy logs server" in str(unbegun.value)
    assert "run.resume=true" not in str(unbegun.value), "it never began"

    def stream(*_: object) -> tuple[str, int]:
        (deployment.runs / "r").mkdir(parents=True)
        return "'rounds' is 0", 1

    monkeypatch.setattr(deployed_run, "stream", stream)
    flower.statuses = [("finished:failed", "")]
    with pytest.raises(DeploymentError, match="failed: 'rounds' is 0") as begun:
        _run(deployment)
    assert "--set split.silos=2 --name r --set run.resume=true" in str(begun.value)


def test_a_server_that_no_longer_answers_has_lost_the_run(
    flower: FakeFlower, deployment: Deployment
) -> None:
    flower.statuses = [("running", "")]
    with pytest.raises(DeploymentError, match="lost"):
        _run(deployment)


def test_members_that_are_down_or_offline_are_named(
    flower: FakeFlower, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployed_run, "list_missing_sites", lambda _: ["s2a"])
    with refuses(DeploymentError, deployment.folder, "offline", "s2a"):
        _run(deployment)
    monkeypatch.setattr(Deployment, "process", lambda self, member: member != "s1a")
    with refuses(DeploymentError, deployment.folder, "down", "s1a"):
        _run(deployment)
    assert flower.settings is None


def test_a_server_in_a_container_is_known_by_its_health(
    flower: FakeFlower, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Deployment, "process", lambda self, member: member != "server")
    monkeypatch.setattr(deployed_run, "read_deployment", lambda folder: deployment)
    object.__setattr__(deployment, "address", "fl.example.org:443")
    monkeypatch.setattr(flower_commands, "is_healthy", lambda _: False)
    with refuses(DeploymentError, "down", "server"):
        _run(deployment)
    monkeypatch.setattr(flower_commands, "is_healthy", lambda _: True)
    assert _run(deployment) == deployment.runs / "r"


def test_a_meeting_is_a_run_of_that_purpose_whose_folder_goes(
    flower: FakeFlower, deployment: Deployment
) -> None:
    flower.meeting = Meeting(2, 2, {}, ("s1a: no",))
    sources = RunSources(changes=("run.name=r",))
    assert meet("fedavg", deployment, sources, 5) == flower.meeting
    assert flower.settings
    assert (flower.settings.common.purpose, flower.settings.common.seed) == ("meet", 5)
    assert not list(deployment.home("server").glob("meeting-*"))
    flower.statuses = [("finished:stopped", "")]
    with pytest.raises(DeploymentError, match="finished:stopped"):
        meet("fedavg", deployment, sources, None)
