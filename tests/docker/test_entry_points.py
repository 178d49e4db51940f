"""The entry points: what they start, and one clear line for what is not as it must be."""

import itertools
import os
import shlex
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedsilo.client_app.privacy.signing import own_code
from fedsilo.client_app.site.node import OWN
from fedsilo.deployment.certificates import make_authority, make_hospital_key
from fedsilo.deployment.deployment import SERVER, read_deployment
from fedsilo.deployment.doctor import hospital_checks
from fedsilo.deployment.kit import AUTHORITY, KEY, make_kit

Runner = Callable[..., Any]


@pytest.fixture(scope="session")
def made_kit(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the kit of north, for a server in a container."""
    folder = tmp_path_factory.mktemp("authority")
    make_authority(folder)
    files = {AUTHORITY: (folder / "ca.crt").read_bytes(), KEY: make_hospital_key()[0]}
    return make_kit("north", "server:9092", "7", "2026-01-02T00:00:00", files)


@pytest.fixture
def place(made_kit: bytes, tmp_path: Path) -> Path:
    """Return a folder as a container sees its root: kit, data, state and cache."""
    (tmp_path / "kit.zip").touch(mode=0o600)
    (tmp_path / "kit.zip").write_bytes(made_kit)
    for name in ("data", "state", "cache"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "table.csv").write_text("age\n61\n")
    return tmp_path


@pytest.fixture
def hospital(place: Path, script: Runner) -> Runner:
    """Return a function that prints a hospital's command, with changes to its environment."""
    folders = [f"--{name}-dir={place / name}" for name in ("data", "state", "cache")]
    own = (f"--kit={place / 'kit.zip'}", f"--site-file={place / 'site.yaml'}")

    def run(**environment: str) -> Any:
        given = {"FEDSILO_DEVICE": "cpu", "FEDSILO_TRUST": "server"} | environment
        return script("start_hospital.py", "--print", *own, *folders, **given)

    return run


@pytest.fixture
def server(place: Path, script: Runner) -> Runner:
    """Return a function that prints the server's command."""

    def run(host: str = "fl.example.org") -> Any:
        state = f"--state-dir={place / 'state'}"
        return script("start_server.py", "--print", state, FEDSILO_HOST=host)

    return run


def refused(done: Any, said: str) -> None:
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "PRIVATE KEY-----" not in done.stderr


def _options(done: Any) -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert "--insecure" not in words
    return {name: value for name, value in itertools.pairwise(words) if name.startswith("--")}


def test_a_hospital_starts_a_supernode_from_its_kit(hospital: Runner, place: Path) -> None:
    options, home = _options(hospital()), place / "state" / "hospital"
    assert options["--superlink"] == "server:9092"
    assert options["--root-certificates"] == str(home / "ca.crt")
    assert options["--auth-supernode-private-key"] == str(home / "node.key")
    assert (home / "node.key").stat().st_mode & 0o777 == 0o600
    config = options["--node-config"]
    for part in (
        'site="north"',
        *(f'{name}-dir="{place / name}"' for name in ("data", "state", "cache")),
        'device="cpu"',
        f'site-file="{home / "site.yaml"}"',
    ):
        assert part in config
    assert 'trust: "server"\n' in (home / "site.yaml").read_text()


def test_a_hospitals_log_says_code_rules_and_key_before_the_first_start(
    hospital: Runner, place: Path
) -> None:
    said = hospital().stderr
    assert "of north, for the server server:9092: the server's operator must read out" in said
    assert "the server's operator may see what this site alone answers" in said
    assert f"north: signs secure sums with key {own_code(place / 'state' / OWN / 'north')}" in said
    again = hospital().stderr
    assert "rules of north" not in again
    assert "signs secure sums" in again


def test_two_containers_of_one_hospital_do_not_start_on_the_same_state(
    place: Path, script: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hospital_checks, "refuse_failing", lambda setup: None)  # asks the server
    folders = [f"--{name}-dir={place / name}" for name in ("data", "state", "cache")]
    own = (f"--kit={place / 'kit.zip'}", f"--site-file={place / 'site.yaml'}")

    def start() -> Any:
        given = {"FEDSILO_DEVICE": "cpu", "FEDSILO_TRUST": "server"}
        return script("start_hospital.py", *own, *folders, **given)

    with pytest.raises(AssertionError, match="becomes another process"):
        start()  # the lock stays open, as in the node that the process becomes
    refused(start(), "north already runs from")


def test_a_mounted_site_file_replaces_the_kits_and_the_stricter_trust_holds(
    hospital: Runner, place: Path
) -> None:
    text = "trust: sums\nmethods: [uefl]\ndatasets: []\nrecords: []\n"
    (place / "site.yaml").write_text(text)
    for _ in range(2):  # also where the kit was opened before
        assert 'trust="server"' in _options(hospital())["--node-config"]
        assert (place / "state" / "hospital" / "site.yaml").read_text() == text
    (place / "site.yaml").unlink()
    (place / "site.yaml").symlink_to(os.devnull)
    assert _options(hospital())  # what was mounted before still holds
    assert (place / "state" / "hospital" / "site.yaml").read_text() == text


def test_a_stricter_trust_of_the_environment_holds_and_a_laxer_one_does_not(
    hospital: Runner, place: Path
) -> None:
    hospital(FEDSILO_TRUST="sums")
    rules = (place / "state" / "hospital" / "site.yaml").read_text()
    assert 'trust="server"' in _options(hospital(FEDSILO_TRUST="server"))["--node-config"]
    refused(hospital(FEDSILO_TRUST="nobody"), "'trust: nobody', but has no 'max-epsilon'")
    assert (place / "state" / "hospital" / "site.yaml").read_text() == rules


def test_a_mounted_site_file_without_trust_takes_it_from_the_environment(
    hospital: Runner, place: Path
) -> None:
    (place / "site.yaml").write_text("methods: [uefl]\ndatasets: []\nrecords: []\n")
    assert 'trust="server"' in _options(hospital())["--node-config"]
    refused(hospital(FEDSILO_TRUST=""), "north has no level of trust")


def test_a_site_file_that_is_not_there_is_never_taken_for_none(
    hospital: Runner, place: Path
) -> None:
    (place / "site.yaml").mkdir()  # what an engine makes of a mistyped path
    refused(hospital(), f"site file {place / 'site.yaml'} is not a file")


def test_a_hospital_refuses_what_is_missing(hospital: Runner, place: Path) -> None:
    refused(hospital(FEDSILO_TRUST=""), "north has no level of trust")
    refused(hospital(FEDSILO_TRUST="friends"), "these rules cannot be used")
    (place / "kit.zip").chmod(0o644)
    refused(hospital(), "has mode 644, so other users may read the private key in it")
    (place / "kit.zip").unlink()
    refused(hospital(), f"{place / 'kit.zip'} does not exist")


def test_a_data_folder_that_was_named_is_not_empty(hospital: Runner, place: Path) -> None:
    (place / "data" / "table.csv").unlink()
    for named in ({}, {"FEDSILO_DATA_FROM": "/srv/north"}):
        refused(hospital(**named), f"data directory {place / 'data'} is empty")
    (place / "data").rmdir()
    refused(hospital(), f"data directory {place / 'data'} is missing")


def test_a_hospital_without_a_data_folder_starts_and_says_so(hospital: Runner, place: Path) -> None:
    """As compose starts one whose ``DATA_1`` is not set: data sets that ship need no files."""
    assert 'data-dir="' in _options(hospital(FEDSILO_DATA_FROM=""))["--node-config"]
    (place / "data" / "table.csv").unlink()
    done = hospital(FEDSILO_DATA_FROM="")
    assert "data-dir" not in _options(done)["--node-config"]
    assert "no data folder is mounted" in done.stderr


def test_a_container_that_cannot_start_stays_unhealthy_until_the_fault_is_gone(
    place: Path, script: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hospital_checks, "refuse_failing", lambda setup: None)  # asks the server
    pauses: list[float] = []
    kit = place / "kit.zip"

    def repair(seconds: float) -> None:
        pauses.append(seconds)
        ill = script("health.py", TMPDIR=str(place))
        assert ill.returncode == 1
        assert ill.stdout.startswith(f"hospital: {kit} has mode 644, so other users may read")
        if len(pauses) == 7:
            kit.chmod(0o600)

    monkeypatch.setattr(time, "sleep", repair)
    kit.chmod(0o644)
    folders = [f"--{name}-dir={place / name}" for name in ("data", "state", "cache")]
    own = (f"--kit={kit}", f"--site-file={place / 'site.yaml'}", "--keep-trying")
    given = {"FEDSILO_DEVICE": "cpu", "FEDSILO_TRUST": "server", "TMPDIR": str(place)}
    with pytest.raises(AssertionError, match="becomes another process"):
        script("start_hospital.py", *own, *folders, **given)
    assert pauses == [5, 10, 20, 40, 60, 60, 60]
    assert "unavailable" in script("health.py", TMPDIR=str(place)).stdout, "the fault is forgotten"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_container_whose_disk_is_full_stays_unhealthy_until_the_fault_is_gone(
    place: Path, script: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hospital_checks, "refuse_failing", lambda setup: None)  # asks the server
    kit = place / "kit.zip"
    kit.chmod(0o644)
    (place / "fedsilo-start-fault").symlink_to("/dev/full")

    def repair(seconds: float) -> None:
        ill = script("health.py", TMPDIR=str(place))
        assert (ill.returncode, ill.stdout) == (1, "127.0.0.1:8081: unavailable\n")
        kit.chmod(0o600)

    monkeypatch.setattr(time, "sleep", repair)
    folders = [f"--{name}-dir={place / name}" for name in ("data", "state", "cache")]
    own = (f"--kit={kit}", f"--site-file={place / 'site.yaml'}", "--keep-trying")
    given = {"FEDSILO_DEVICE": "cpu", "FEDSILO_TRUST": "server", "TMPDIR": str(place)}
    with pytest.raises(AssertionError, match="becomes another process"):
        script("start_hospital.py", *own, *folders, **given)


def test_a_server_makes_its_deployment_once_and_starts_a_superlink(
    server: Runner, place: Path
) -> None:
    state = place / "state"
    options = _options(server())
    assert options["--fleet-api-address"] == "0.0.0.0:9092"
    assert (options["--host"], options["--port"]) == ("127.0.0.1", "8000")
    assert options["--database"] == str(state / "server" / "superlink.db")
    assert "--enable-supernode-auth" in options
    made = read_deployment(state)
    assert (made.address, made.members) == ("fl.example.org:9092", [SERVER])
    assert (state / "server" / "registry.json").read_text() == "{}\n"
    assert 'address = "127.0.0.1:8000"' in (state / "server" / "flwr" / "config.toml").read_text()
    certificate = (state / "secrets" / "server.crt").read_bytes()
    assert _options(server()) == options
    assert (state / "secrets" / "server.crt").read_bytes() == certificate


def test_a_server_refuses_another_host_or_none(server: Runner, place: Path) -> None:
    refused(server(""), "FEDSILO_HOST is not set: give the name")
    refused(server("a b"), ":PORT of at most 65535, but is 'a b'")
    server()
    refused(server("other.example.org"), "has fl.example.org:9092")
    shutil.rmtree(place / "state")
    refused(server(), f"state directory {place / 'state'} is missing")


def test_a_server_refuses_an_open_key_a_wrong_one_and_a_certificate_that_has_ended(
    server: Runner, place: Path
) -> None:
    server()
    folder = place / "state" / "secrets"
    (folder / "server.key").chmod(0o604)
    refused(server(), "has mode 604, so other users may read it: chmod 600")
    (folder / "server.key").chmod(0o600)
    key = serialization.load_pem_private_key((folder / "server.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "old")])
    begin, end = datetime(2020, 1, 1, tzinfo=UTC), datetime(2021, 1, 1, tzinfo=UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, begin, end)
    good = (folder / "server.crt").read_bytes()
    old = builder.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)
    (folder / "server.crt").write_bytes(old)
    refused(server(), "ended on 2021-01-01 00:00 UTC: renew it ('fedsilo deploy renew server')")
    (folder / "server.crt").write_bytes(good)
    shutil.copy(folder / "ca.key", folder / "server.key")
    refused(server(), f"is not the key of {folder / 'server.crt'}")


def test_health_is_refused_where_nothing_answers(script: Runner) -> None:
    done = script("health.py")
    assert done.returncode == 1
    assert done.stdout == "127.0.0.1:8081: unavailable\n"
