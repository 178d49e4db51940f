"""What the compose files and the Dockerfile promise a hospital, read without an engine."""

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.test_compose_end_to_end import CONFIG

ROOT = Path(__file__).resolve().parents[2]

FILES = ("compose.yaml", "compose.cpu.yaml")
HOSPITALS = [f"hospital-{number}" for number in range(1, 7)]


def read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
    return found


@pytest.fixture(params=FILES)
def compose(request: pytest.FixtureRequest, docker_folder: Path) -> dict[str, Any]:
    """Return each compose file in turn."""
    return read(docker_folder, request.param)


def test_there_are_a_server_and_six_hospitals(compose: dict[str, Any]) -> None:
    assert sorted(compose["services"]) == [*HOSPITALS, "server"]


def test_every_container_is_confined(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["read_only"] is True
        assert service["user"] == "10001:10001"
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert [mount.split(":")[0] for mount in service["tmpfs"]] == ["/tmp"]
        assert not {"privileged", "network_mode", "pid", "ipc", "devices"} & set(service)


def test_nothing_is_reached_from_outside(compose: dict[str, Any]) -> None:
    assert [name for name, service in compose["services"].items() if "ports" in service] == []
    assert all(network["internal"] is True for network in compose["networks"].values())


def test_each_hospital_shares_a_network_with_the_server_alone(compose: dict[str, Any]) -> None:
    members: dict[str, list[str]] = {name: [] for name in compose["networks"]}
    for name, service in compose["services"].items():
        for network in service["networks"]:
            members[network].append(name)
    assert members == {name: ["server", name] for name in HOSPITALS}


def test_each_hospital_has_its_own_kit_alone_and_the_server_no_secret(
    compose: dict[str, Any],
) -> None:
    assert not [mount for mount in compose["services"]["server"]["volumes"] if "secrets" in mount]
    for number, name in enumerate(HOSPITALS, start=1):
        (mount,) = (
            volume for volume in compose["services"][name]["volumes"] if isinstance(volume, dict)
        )
        assert mount["source"] == f"${{FEDSILO_KITS:-./kits}}/${{SITE_{number}:-{name}}}.zip"
        assert (mount["type"], mount["target"]) == ("bind", "/run/secrets/kit.zip")
        assert mount["read_only"] is True


def test_no_secret_is_in_the_environment(compose: dict[str, Any]) -> None:
    allowed = {"FEDSILO_HOST", "FEDSILO_DEVICE", "FEDSILO_TRUST", "FEDSILO_DATA_FROM"}
    for service in compose["services"].values():
        assert set(service.get("environment", {})) <= allowed


def test_no_level_of_trust_is_chosen_for_a_hospital(compose: dict[str, Any]) -> None:
    for name in HOSPITALS:
        assert compose["services"][name]["environment"]["FEDSILO_TRUST"] == "${FEDSILO_TRUST:-}"


def test_data_are_read_only_and_volumes_a_hospitals_own(compose: dict[str, Any]) -> None:
    seen: list[str] = []
    for number, name in enumerate(HOSPITALS, start=1):
        service = compose["services"][name]
        volumes = [volume for volume in service["volumes"] if isinstance(volume, str)]
        assert service["environment"]["FEDSILO_DATA_FROM"] == f"${{DATA_{number}:-}}"
        assert f"${{DATA_{number}:-data-{number}}}:/data:ro" in volumes
        assert f"${{SITE_FILE_{number}:-/dev/null}}:/etc/fedsilo/site.yaml:ro" in volumes
        writable = [volume for volume in volumes if not volume.endswith(":ro")]
        assert [volume.split(":")[1] for volume in writable] == ["/state", "/cache"]
        seen += [volume.split(":")[0] for volume in writable]
    seen += [volume.split(":")[0] for volume in compose["services"]["server"]["volumes"]]
    assert len(seen) == len(set(seen)) == 14
    assert set(seen) <= set(compose["volumes"])


def test_each_hospital_has_one_gpu_that_can_be_chosen(docker_folder: Path) -> None:
    services = read(docker_folder, "compose.yaml")["services"]
    for number, name in enumerate(HOSPITALS):
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [f"${{GPU_{number}:-0}}"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        assert services[name]["environment"]["FEDSILO_DEVICE"] == "cuda"
    assert "deploy" not in services["server"]


def test_the_files_differ_in_devices_alone(docker_folder: Path) -> None:
    with_gpu, without = (read(docker_folder, name) for name in FILES)
    with_gpu["x-environment"]["FEDSILO_DEVICE"] = "cpu"
    for name in HOSPITALS:
        del with_gpu["services"][name]["deploy"]
        with_gpu["services"][name]["environment"]["FEDSILO_DEVICE"] = "cpu"
    assert with_gpu == without


def test_each_role_may_have_wheels_of_its_own(compose: dict[str, Any]) -> None:
    locks = [
        compose["services"][name]["build"]["args"]["LOCK"] for name in ("server", HOSPITALS[0])
    ]
    assert locks == ["${SERVER_LOCK:-requirements.lock}", "${HOSPITAL_LOCK:-requirements.lock}"]


def test_separate_machines_open_the_servers_port_alone(docker_folder: Path) -> None:
    overlay = read(docker_folder, "compose.separate.yaml")
    assert overlay["services"] == {"server": {"ports": ["${FEDSILO_PORT:-9092}:9092"]}}
    assert overlay["networks"] == {name: {"internal": False} for name in HOSPITALS}


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="docker-compose is not installed")
@pytest.mark.parametrize("given", [FILES[1:], (FILES[0], "compose.separate.yaml")])
def test_docker_compose_takes_the_files(given: tuple[str, ...], docker_folder: Path) -> None:
    files = [part for name in given for part in ("-f", str(docker_folder / name))]
    settings = {"SITE_3": "north", "GPU_2": "0", "FEDSILO_KITS": "/somewhere"}
    done = subprocess.run(
        ["docker-compose", *files, "config"],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    whole = yaml.safe_load(done.stdout)
    third = whole["services"]["hospital-3"]
    assert "/somewhere/north.zip" in [
        volume["source"] for volume in third["volumes"] if isinstance(volume, dict)
    ]
    assert done.stderr == "", "nothing is said of kits that are not made yet"
    if FILES[0] in given:
        (device,) = third["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == ["0"]


def test_the_last_stages_compile_nothing_and_drop_root(docker_folder: Path) -> None:
    text = (docker_folder / "Dockerfile").read_text(encoding="utf-8")
    stages = dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM|\Z)", text, re.M | re.S))
    assert list(stages) == ["build", "source", "runtime", "server", "hospital"]
    assert "--require-hashes" in stages["build"]
    assert "ARG LOCK=requirements.lock\nCOPY docker/${LOCK} " in stages["build"]
    assert "--only-binary :all:" in stages["build"]
    last = stages["runtime"] + stages["server"] + stages["hospital"]
    assert not re.search(r"apt-get|gcc|build-essential|pip", last)
    for name in ("server", "hospital"):
        assert "USER 10001:10001" in stages[name]
    assert "HEALTHCHECK" in stages["runtime"]


def test_what_is_not_needed_never_reaches_the_engine(docker_folder: Path) -> None:
    lines = (docker_folder.parent / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*", "all is shut out first"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    packages = {"client_app", "datasets", "fedsilo", "models", "server_app", "strategies"}
    files = {"docker/requirements*.lock", "docker/*.py", "pyproject.toml", "simulation.yaml"}
    assert allowed == packages | files | {"README.md", "LICENSE"}
    assert {"**/*.key", "**/*.crt", "**/*.pem"} <= set(rules[len(allowed) :])


def test_the_settings_of_the_end_to_end_test_exist() -> None:
    """Flower refuses a run with a key that the app lacks, and that test runs seldom."""
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = set(flatten(whole["tool"]["flwr"]["app"]["config"]))
    assert {pair.split("=")[0] for pair in CONFIG.split()} <= known


def flatten(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
