"""The entry points: what they start, and one clear line for what is not as it must be."""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

Runner = Callable[..., Any]
HOSPITAL, SERVER, HOSPITALS = "start_hospital.py", "start_server.py", "hospitals.py"


@pytest.fixture
def place(made_secrets: Path, tmp_path: Path) -> Path:
    """Return a folder as a container sees its root: secrets, data, state and cache."""
    shutil.copytree(made_secrets, tmp_path / "secrets")
    shutil.copy(tmp_path / "secrets" / "north.key", tmp_path / "secrets" / "node.key")
    for name in ("data", "state", "cache"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "table.csv").write_text("age\n61\n")
    return tmp_path


@pytest.fixture
def hospital(place: Path, script: Runner) -> Runner:
    """Return a function that prints a hospital's command, with changes to its environment."""
    folders = [f"--{name}-dir={place / name}" for name in ("data", "state", "cache")]

    def run(**environment: str) -> Any:
        given = {"FEDSILO_SITE": "north", "FEDSILO_DEVICE": "cpu"} | environment
        site_file = f"--site-file={place / 'site.yaml'}"
        return script(
            HOSPITAL, "--print", f"--secrets={place / 'secrets'}", *folders, site_file, **given
        )

    return run


@pytest.fixture
def server(place: Path, script: Runner) -> Runner:
    """Return a function that prints the server's command."""

    def run() -> Any:
        folders = f"--secrets={place / 'secrets'}", f"--state-dir={place / 'state'}"
        return script(SERVER, "--print", *folders)

    return run


def refused(done: Any, said: str) -> None:
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "PRIVATE KEY-----" not in done.stderr


def test_a_hospital_starts_a_supernode_with_its_own_words(hospital: Runner, place: Path) -> None:
    done = hospital(FEDSILO_SERVER="fl.example.org:9092")
    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stdout)
    assert command[:3] == ["python", "-m", "fedsilo.client_app.worker.hospital"]
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert options["--superlink"] == "fl.example.org:9092"
    assert options["--root-certificates"] == str(place / "secrets" / "ca.crt")
    assert options["--auth-supernode-private-key"] == str(place / "secrets" / "node.key")
    folders = (f'{name}-dir="{place / name}"' for name in ("data", "state", "cache"))
    secrets = place / "secrets"
    signing = (
        f'signing-key="{secrets / "node.key"}"',
        f'site-registry="{secrets / "registry.json"}"',
    )
    own = ['site="north"', *folders, 'device="cpu"', *signing]
    assert options["--node-config"] == " ".join(own)
    assert "--insecure" not in command


def test_a_site_file_is_passed_on_where_there_is_one(hospital: Runner, place: Path) -> None:
    (place / "site.yaml").write_text("methods: [uefl]\n")
    assert f'site-file="{place / "site.yaml"}"' in hospital().stdout
    (place / "site.yaml").unlink()
    (place / "site.yaml").symlink_to(os.devnull)
    assert "site-file" not in hospital().stdout


def test_a_site_file_that_is_not_there_is_never_taken_for_none(
    hospital: Runner, place: Path
) -> None:
    (place / "site.yaml").mkdir()  # what an engine makes of a mistyped path
    refused(hospital(), f"site file {place / 'site.yaml'} is not a file")


def test_a_server_starts_a_superlink_with_tls_and_authentication(
    server: Runner, place: Path
) -> None:
    done = server()
    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stdout)
    assert command[0] == "flower-superlink"
    assert "--insecure" not in command
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= set(command)
    assert command[command.index("--host") + 1] == "127.0.0.1", "the Control API stays inside"
    assert command[command.index("--database") + 1] == str(place / "state" / "superlink.db")
    connection = (place / "state" / "flwr" / "config.toml").read_text()
    assert f'root-certificates = "{place / "secrets" / "ca.crt"}"' in connection


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("FEDSILO_SITE", "", "FEDSILO_SITE is not set: give this hospital's name"),
        ("FEDSILO_SITE", 'a" device="cuda', "FEDSILO_SITE is 'a\" device=\"cuda'"),
        ("FEDSILO_SERVER", "server", "FEDSILO_SERVER is 'server': give host:port"),
        ("FEDSILO_DEVICE", "gpu", "FEDSILO_DEVICE is 'gpu': give auto, cpu or cuda"),
    ],
)
def test_a_hospital_refuses_bad_words(
    variable: str, value: str, said: str, hospital: Runner
) -> None:
    refused(hospital(**{variable: value}), said)


@pytest.mark.parametrize("name", ["ca.crt", "node.key"])
def test_a_hospital_refuses_a_missing_secret(name: str, hospital: Runner, place: Path) -> None:
    (place / "secrets" / name).unlink()
    refused(hospital(), f"secret {place / 'secrets' / name} is missing")


@pytest.mark.parametrize("name", ["ca.crt", "server.crt", "server.key"])
def test_a_server_refuses_a_missing_secret(name: str, server: Runner, place: Path) -> None:
    (place / "secrets" / name).unlink()
    refused(server(), f"secret {place / 'secrets' / name} is missing")


def test_a_key_that_others_may_read_is_refused(
    hospital: Runner, server: Runner, place: Path
) -> None:
    (place / "secrets" / "node.key").chmod(0o640)
    refused(hospital(), "has mode 640, others may read it: chmod 600")
    (place / "secrets" / "server.key").chmod(0o604)
    refused(server(), "has mode 604, others may read it: chmod 600")


def test_a_secret_of_another_kind_is_refused(hospital: Runner, place: Path) -> None:
    shutil.copy(place / "secrets" / "server.key", place / "secrets" / "node.key")
    refused(hospital(), "holds no 'BEGIN OPENSSH PRIVATE KEY': another file was mounted there")


def test_the_servers_key_must_be_its_certificates(server: Runner, place: Path) -> None:
    shutil.copy(place / "secrets" / "ca.key", place / "secrets" / "server.key")
    refused(server(), f"is not the key of {place / 'secrets' / 'server.crt'}")


def test_a_certificate_that_has_ended_is_refused(server: Runner, place: Path) -> None:
    folder = place / "secrets"
    key = serialization.load_pem_private_key((folder / "server.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "old")])
    begin, end = datetime(2020, 1, 1, tzinfo=UTC), datetime(2021, 1, 1, tzinfo=UTC)
    old = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, begin, end)
        .sign(key, hashes.SHA384())
        .public_bytes(serialization.Encoding.PEM)
    )
    (folder / "server.crt").write_bytes(old)
    said = "ended on 2021-01-01 00:00 UTC: renew it (make-secrets.sh --renew-server)"
    refused(server(), f"certificate {folder / 'server.crt'} {said}")


def test_a_hospital_refuses_data_that_are_missing_or_empty(hospital: Runner, place: Path) -> None:
    (place / "data" / "table.csv").unlink()
    refused(hospital(), f"data directory {place / 'data'} is empty")
    (place / "data").rmdir()
    refused(hospital(), f"data directory {place / 'data'} is missing")


def test_a_state_volume_must_be_there(hospital: Runner, server: Runner, place: Path) -> None:
    (place / "state").rmdir()
    refused(hospital(), f"state directory {place / 'state'} is missing")
    refused(server(), f"state directory {place / 'state'} is missing")


def test_health_is_refused_where_nothing_answers(script: Runner) -> None:
    done = script("health.py")
    assert done.returncode == 1
    assert done.stdout == "127.0.0.1:8081: unavailable\n"


@pytest.fixture
def flwr(tmp_path: Path) -> Path:
    """Put a ``flwr`` on the path that writes down its words and answers as Flower does."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "flwr").write_text(
        f'#!/bin/sh\necho "$2 $3" >> {tmp_path}/calls\n'
        f'[ -e {tmp_path}/broken ] && echo \'{{"success": false, "error-message": "in use"}}\' &&'
        " exit 1\n"
        f"grep -qs unregister {tmp_path}/calls && state=unregistered || state=online\n"
        '[ "$2" = list ] && echo \'{"success": true, "nodes": [{"node-id": "77", "status":'
        " \"'$state'\"}]}' && exit\n"
        'echo \'{"success": true, "node-id": 77}\'\n'
    )
    (tools / "flwr").chmod(0o755)
    return tools


@pytest.fixture
def registry(flwr: Path, place: Path, script: Runner) -> Runner:
    """Return a function that runs ``hospitals.py`` over the made folder."""
    path = f"{flwr}:{os.environ['PATH']}"

    def run(*words: str, key: str = "") -> Any:
        text = (place / "secrets" / f"{key}.pub").read_text() if key else ""
        return script(HOSPITALS, f"--state-dir={place / 'state'}", *words, stdin=text, PATH=path)

    return run


def fingerprint(public_key: Path) -> str:
    """Return what OpenSSH says of a key."""
    done = subprocess.run(
        ["ssh-keygen", "-l", "-f", str(public_key)], capture_output=True, text=True, check=True
    )
    return done.stdout.split()[1]


def test_a_key_under_two_names_is_refused(registry: Runner, place: Path) -> None:
    registry("register", "north", key="north")
    refused(registry("register", "south", key="north"), "south: its key is north's")
    assert list(json.loads((place / "state" / "registry.json").read_text())) == ["north"]


def test_a_hospital_is_registered_once_listed_and_revoked(registry: Runner, place: Path) -> None:
    assert registry("register", "north", key="north").stdout == "north is registered as node 77\n"
    again = registry("register", "north", key="north")
    assert (again.returncode, again.stdout) == (0, "north is registered already\n")
    assert registry("list").stdout == "north 77 online\n"
    told = json.loads((place / "state" / "registry.json").read_text())
    assert told["north"]["node-id"] == "77"
    assert told["north"]["key"] == fingerprint(place / "secrets" / "north.pub")
    assert registry("revoke", "north").stdout == "north is revoked, node 77\n"
    assert json.loads((place / "state" / "registry.json").read_text()) == {}
    assert registry("list").stdout == "\n"
    calls = (place / "calls").read_text().split("\n")
    assert [call.split()[0] for call in calls[:-1]] == ["register", "list", "unregister", "list"]
    assert calls[2] == "unregister 77"
    assert list((place / "state" / "hospitals").iterdir()) == []


def test_a_node_that_no_file_names_is_listed(registry: Runner, place: Path) -> None:
    (place / "state" / "hospitals").mkdir()
    assert registry("list").stdout == "(no name, 77) 77 online\n"


def test_a_name_keeps_its_key_until_it_is_revoked(registry: Runner, place: Path) -> None:
    registry("register", "north", key="north")
    refused(registry("register", "north", key="south"), "north is registered with another key")
    card = json.loads((place / "state" / "hospitals" / "north.json").read_text())
    assert card["key"] == " ".join((place / "secrets" / "north.pub").read_text().split()[:2])


def test_what_flower_refuses_is_told_and_not_remembered(registry: Runner, place: Path) -> None:
    (place / "broken").touch()
    done = registry("register", "north", key="north")
    refused(done, "flwr supernode register: in use; an earlier registration of it was cut short")
    assert list((place / "state" / "hospitals").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("register", "north"), "standard input holds no EC P-384 public key"),
        (("register", "../north"), "'../north' is no hospital's name"),
        (("revoke", "east"), "east is not registered"),
        (("revoke",), "'' is no hospital's name"),
    ],
)
def test_the_registry_refuses_bad_words(
    words: tuple[str, ...], said: str, registry: Runner
) -> None:
    refused(registry(*words), said)


def test_register_sh_names_what_is_missing(script: Runner, tmp_path: Path) -> None:
    refused(script("register.sh", "--secrets", tmp_path), "holds no public key")
    refused(script("register.sh", "--secrets", tmp_path, "north"), "north.pub is missing")
    refused(script("register.sh", "--everything"), "no such option: --everything")


def test_register_sh_hands_each_key_to_the_server(
    script: Runner, made_secrets: Path, tmp_path: Path
) -> None:
    fake = tmp_path / "compose"
    fake.write_text(f'#!/bin/sh\necho "$@" "$(cut -d" " -f1)" >> {tmp_path}/calls\n')
    fake.chmod(0o755)
    done = script("register.sh", "--secrets", made_secrets, COMPOSE=f"{fake} -f some.yaml")
    assert done.returncode == 0, done.stderr
    start = "-f some.yaml exec -T server python /opt/fedsilo/hospitals.py register"
    expected = [f"{start} {name} ecdsa-sha2-nistp384" for name in ("north", "south")]
    assert (tmp_path / "calls").read_text().splitlines() == expected
