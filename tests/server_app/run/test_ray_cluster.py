"""A Ray cluster is looked at before a run is spread over it: unit by unit; for real in soak."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsilo.models.contract.errors import SettingError
from fedsilo.server_app.run import ray_cluster
from fedsilo.server_app.run.processes import free_ports
from fedsilo.server_app.run.ray_cluster import (
    TOKEN,
    Cluster,
    describe,
    fit_cluster,
    ray_variables,
    unused_cluster,
)

FILES = {"client_app/app.py": "a1", "models/x.py": "b2"}
HERE: dict[str, Any] = {
    "python": "3.11.2",
    "packages": {"flwr": "1.39.0", "ray": "2.55.1"},
    "fedsilo": json.dumps(FILES),
    "fault": "",
}
Asked = Callable[..., None]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Return a function that lets two nodes answer, the second with changes."""

    def answer(writes: bool = True, **changes: Any) -> None:
        def found(address: str, shared: Path, packages: list[str]) -> dict[str, Any]:
            token = {"token": (shared / TOKEN).read_text()}
            second = None if changes.get("found", ...) is None else HERE | token | changes
            nodes = [
                {"id": name, "host": f"host-{name} (10.0.0.{index})", "cpus": 2.0, "found": facts}
                for index, (name, facts) in enumerate({"n1": HERE | token, "n2": second}.items())
            ]
            for node in nodes[: 2 if writes else 1]:
                (shared / str(node["id"])).write_text("seen")
            return {"address": "10.0.0.0:6379", "nodes": nodes}

        monkeypatch.setattr(ray_cluster, "_asked", found)
        monkeypatch.setattr(ray_cluster, "describe", lambda *_: HERE)

    return answer


def test_a_fit_cluster_is_told_with_its_own_address(asked: Asked, tmp_path: Path) -> None:
    asked()
    assert fit_cluster("auto", tmp_path / "runs", {}) == Cluster("10.0.0.0:6379", 2, 4.0)
    assert list((tmp_path / "runs").iterdir()) == [], "nothing is left in the folder of runs"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"found": None}, "did not answer: look at 'ray status'"),
        ({"token": "No such file or directory"}, "does not share .*runs: 'out' must be"),
        ({"writes": False}, "does not share .*runs: 'out' must be"),
        ({"fedsilo": "", "fault": "ModuleNotFoundError: x"}, r"has no fedsilo .* \(ModuleNot"),
        ({"python": "3.12.1"}, r"has Python 3.12.1, this machine 3.11.2: install"),
        (
            {"packages": {"flwr": "1.38.0"}},
            "has flwr 1.38.0 where this machine has 1.39.0, ray nowhere where this machine",
        ),
        (
            {"fedsilo": json.dumps(FILES | {"models/x.py": "c3", "models/y.py": "d4"})},
            r"another fedsilo, models/x.py, models/y.py differ: install this machine's",
        ),
    ],
)
def test_an_unfit_node_is_named_with_what_to_do(
    changes: dict[str, Any], told: str, asked: Asked, tmp_path: Path
) -> None:
    asked(**changes)
    with pytest.raises(SettingError, match=told) as raised:
        fit_cluster("auto", tmp_path / "runs", {})
    assert str(raised.value).startswith("node host-n2 (10.0.0.1) of the Ray cluster at auto ")
    assert "\n" not in str(raised.value)
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("address", ["here", "10.0.0.1", "10.0.0.1:0", "h:99999", "ray://h:1", ""])
def test_an_address_is_auto_or_host_and_port(address: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="it must be auto or HOST:PORT"):
        fit_cluster(address, tmp_path, {})


def test_an_address_that_does_not_answer_is_told_at_once(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with pytest.raises(SettingError, match=rf"no Ray cluster answers at 127.0.0.1:{port} .*head"):
        fit_cluster(f"127.0.0.1:{port}", tmp_path, {})


def test_what_answers_and_is_no_cluster_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_LIMIT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(SettingError, match="did not answer within 0 s: look at 'ray status'"):
            fit_cluster(f"127.0.0.1:{port}", tmp_path, {})


def test_a_folder_that_cannot_be_written_is_told(asked: Asked, tmp_path: Path) -> None:
    asked()
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"folder .*file/runs cannot be written: "):
        fit_cluster("auto", tmp_path / "file" / "runs", {})


def test_resources_of_a_cluster_of_ones_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="resource 'init-args-num-cpus' is for a cluster that"):
        fit_cluster("auto", tmp_path, {"init-args-num-cpus": 4})


def test_without_an_address_ray_starts_a_cluster_of_its_own() -> None:
    assert ray_variables(None, {"FEDSILO_DATA": "/d"}) == {"RAY_ADDRESS": "local"}
    assert unused_cluster({}) is unused_cluster({"RAY_ADDRESS": "local"}) is None
    told = unused_cluster({"RAY_ADDRESS": "10.0.0.1:6379"})
    assert told is not None
    assert "10.0.0.1:6379, which is not used" in told


def test_what_sites_read_of_the_environment_travels() -> None:
    environment = {"FEDSILO_DATA": "/d", "OMP_NUM_THREADS": "1", "HOME": "/root", "PATH": "/bin"}
    told = ray_variables(Cluster("10.0.0.0:6379", 2, 4.0), environment)
    assert told["RAY_ADDRESS"] == "10.0.0.0:6379"
    travelling = json.loads(told["RAY_JOB_CONFIG_JSON"])["runtime_env"]["env_vars"]
    assert travelling == {"FEDSILO_DATA": "/d", "OMP_NUM_THREADS": "1"}


def test_a_node_tells_what_it_has(tmp_path: Path) -> None:
    (tmp_path / TOKEN).write_text("secret")
    found = describe("node", str(tmp_path), ["flwr", "no-such-package"])
    assert (found["token"], found["fault"]) == ("secret", "")
    assert found["packages"]["flwr"].startswith("1.39")
    assert found["packages"]["no-such-package"] == ""
    assert "client_app/app.py" in json.loads(found["fedsilo"])
    assert (tmp_path / "node").read_text() == "node"
    nowhere = describe("node", str(tmp_path / "gone"), [])
    assert nowhere["token"] == "No such file or directory"
