"""``fedsilo doctor server``: the checks of a server that runs, with a deployment."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsilo.deployment.deployment import Deployment, plan
from fedsilo.deployment.doctor import server as checks
from fedsilo.deployment.doctor.findings import Finding, Status, examine
from fedsilo.deployment.doctor.server import ServerSetup

Nodes = Callable[..., Finding]


def _examine(name: str, setup: ServerSetup) -> Finding:
    chosen = [replace(check, needs=()) for check in checks.CHECKS if check.name == name]
    (finding,) = examine(chosen, setup)
    return finding


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    made = plan(tmp_path, ["north", "west"], [8000, 9092, 9101, 9102], {})
    (tmp_path / "deployment.json").touch()
    return made.with_node("far", "9")


@pytest.fixture
def nodes(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Return a function that checks the nodes; it takes what the played server answers."""

    def check(
        healthy: bool = True,
        away: tuple[str, ...] = (),
        unknown: tuple[str, ...] = (),
        **states: Any,
    ) -> Finding:
        answers = {"north": "online", "west": "online", "far": "offline"} | states
        monkeypatch.setattr(checks, "is_healthy", lambda _: healthy)
        monkeypatch.setattr(checks, "node_states", lambda _: answers)
        monkeypatch.setattr(checks, "unknown_nodes", lambda _: list(unknown))
        monkeypatch.setattr(checks, "list_missing_sites", lambda _: list(away))
        return _examine("nodes", ServerSetup.of(deployment))

    return check


def test_the_setup_of_a_deployment_has_its_files_ports_and_hospitals(
    deployment: Deployment,
) -> None:
    setup = ServerSetup.of(deployment)
    assert [name for name, _ in setup.hospitals] == ["north", "west", "far"]
    assert (setup.fleet, setup.control) == ("127.0.0.1:9092", "127.0.0.1:8000")
    assert setup.mark == str(deployment.secrets / "server.key")
    assert ServerSetup().mark == ""


def test_both_registrations_pass_though_a_hospital_elsewhere_is_offline(nodes: Nodes) -> None:
    found = nodes()
    assert found.status is Status.PASSED
    assert "far (offline)" in found.said


def test_a_registration_that_one_side_lacks_fails_with_its_fix(nodes: Nodes) -> None:
    gone = nodes(far="unregistered", unknown=("31",))
    assert (gone.status, "far" in gone.said) == (Status.FAILED, True)
    assert gone.fix.endswith("'fedsilo deploy renew far'")
    stranger = nodes(unknown=("31", "32"))
    assert (stranger.status, "31, 32" in stranger.said) == (Status.FAILED, True)
    assert "flwr supernode unregister" in stranger.fix


def test_a_site_of_this_machine_that_is_offline_fails(nodes: Nodes) -> None:
    away = nodes(away=("west",), west="offline")
    assert away.status is Status.FAILED
    assert "west is offline" in away.said


def test_a_server_that_does_not_answer_or_has_no_deployment_is_skipped(nodes: Nodes) -> None:
    assert nodes(healthy=False).status is Status.SKIPPED
    assert _examine("nodes", ServerSetup()).status is Status.SKIPPED


def test_a_running_server_is_asked_by_the_address_that_it_listens_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Path]] = []
    runs = True
    monkeypatch.setattr(checks.machine, "runs_on", lambda port, mark: runs)
    monkeypatch.setattr(checks.credentials, "check_handshake", lambda *given: asked.append(given))
    authority = tmp_path / "ca.crt"
    found = _examine("answer", ServerSetup(authority=authority, fleet="0.0.0.0:9092"))
    assert found.status is Status.PASSED
    assert asked == [("127.0.0.1:9092", authority)]
    runs = False
    assert _examine("answer", ServerSetup(authority=authority)).status is Status.SKIPPED
    assert len(asked) == 1


def test_a_database_whose_commits_are_slow_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = ServerSetup(database=tmp_path / "superlink.db")
    monkeypatch.setattr(checks, "commit_seconds", lambda folder: [0.1, 0.3, 0.3])
    slow = _examine("database", setup)
    assert (slow.status, "300 ms" in slow.said) == (Status.FAILED, True)
    monkeypatch.setattr(checks, "commit_seconds", lambda folder: [0.001, 0.002, 3.0])
    assert _examine("database", setup).status is Status.PASSED, "one slow commit is nobody's fault"


def test_a_registry_of_others_than_the_named_hospitals_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "registered_keys", lambda path: {"north": "a", "other": "b"})
    registry = tmp_path / "registry.json"
    found = _examine("registry", ServerSetup(registry=registry, hospitals=(("north", None),)))
    assert found.status is Status.PASSED
    assert "other" in found.details[0]
    assert not _examine("registry", ServerSetup(registry=registry)).details
    assert _examine("disk", ServerSetup()).status is Status.SKIPPED
