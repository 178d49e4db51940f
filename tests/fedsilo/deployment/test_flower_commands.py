"""Calls of ``flwr`` by a deployment: what comes back, and what is awaited of its members."""

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.deployment import flower_commands as flower
from fedsilo.deployment.deployment import Deployment, DeploymentError, plan
from tests.support.errors import refuses


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """Return a deployment of north and west, whose processes all run."""
    monkeypatch.setattr(Deployment, "process", lambda self, member: SimpleNamespace(pid=7))
    return plan(tmp_path, ["west", "north"], [8000, 9092, 9101, 9102], {})


def _answers(monkeypatch: pytest.MonkeyPatch, out: str, err: str = "") -> list[list[str]]:
    """Play the command ``flwr``, and return a list of its command lines."""
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, out, err)

    monkeypatch.setattr(flower.subprocess, "run", run)
    monkeypatch.setattr(flower, "is_healthy", lambda deployment: True)
    return asked


def test_an_answer_is_json_and_the_command_is_printed_before(
    planned: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _answers(monkeypatch, '{"success": true, "run-id": 5}')
    printed: list[str] = []
    assert flower.flwr(planned, "run", "my app", say=printed.append)["run-id"] == 5
    assert asked[-1][1:] == ["run", "my app", "--format", "json"]
    assert printed[0].endswith("flwr run 'my app' --format json")


@pytest.mark.parametrize(
    ("out", "err", "reason"),
    [
        ('{"success": false, "error-message": "no such\\n node"}', "", "no such node"),
        ("Traceback\n", "ValueError: no\n\n", "ValueError: no"),
        ("", "", "no output"),
    ],
)
def test_a_failed_call_names_its_command_and_the_last_words(
    out: str, err: str, reason: str, planned: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    _answers(monkeypatch, out, err)
    with pytest.raises(DeploymentError) as failed:
        flower.flwr(planned, "supernode", "list", "fedsilo")
    assert str(failed.value) == f"'flwr supernode list' failed: {reason}"


def test_sites_have_the_state_of_their_nodes_and_other_nodes_are_unknown(
    planned: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = '[{"node-id": 5, "status": "online"}, {"node-id": 9, "status": "offline"},'
    nodes += '{"node-id": 8, "status": "unregistered"}]'
    _answers(monkeypatch, f'{{"success": true, "nodes": {nodes}}}')
    planned.folder.joinpath("deployment.json").touch()
    deployment = planned.with_node("north", "5").with_node("far", "9")
    states = {"north": "online", "west": "unregistered", "far": "offline"}
    assert flower.node_states(deployment) == states
    assert flower.unknown_nodes(deployment) == []
    assert flower.unknown_nodes(planned) == ["5", "9"]
    assert flower.list_missing_sites(deployment) == ["west"], "far is on another machine"
    monkeypatch.setattr(Deployment, "process", lambda self, member: None)
    assert flower.list_missing_sites(deployment) == ["north", "west"]


def test_members_are_awaited_until_none_is_missing(
    planned: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    looks = iter([["north", "west"], ["west"], []])
    flower.wait_for(planned, lambda deployment: next(looks))
    assert next(looks, None) is None


@pytest.mark.parametrize("ended", [True, False])
def test_a_member_that_ends_or_takes_too_long_is_told_with_the_end_of_its_log(
    ended: bool, planned: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = planned.log("west")
    log.parent.mkdir(parents=True)
    log.write_text("begins\nno such folder\n\n")
    if ended:
        monkeypatch.setattr(Deployment, "process", lambda self, member: None)
    else:
        monkeypatch.setattr(flower, "_START_LIMIT", -1.0)
    with refuses(DeploymentError, "west", log) as failed:
        flower.wait_for(planned, lambda deployment: ["west"])
    assert ("ended at its start" in str(failed.value)) is ended
    assert ": no such folder (" in str(failed.value)


def test_a_killed_site_is_waited_for_until_the_server_notices(
    planned: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    online = iter([["west"], ["west"], []])
    monkeypatch.setattr(flower, "list_online_sites", lambda deployment: next(online))
    told: list[str] = []
    flower.wait_until_left(planned, "west", told.append)
    assert len(told) == 1
    assert next(online, None) is None
    monkeypatch.setattr(flower, "list_online_sites", lambda deployment: [])
    flower.wait_until_left(planned, "west", told.append)
    assert len(told) == 1, "it had signed off"
