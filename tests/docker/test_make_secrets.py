"""Certificates and keys: names, modes, ends, and what happens when a call fails."""

import datetime
import ipaddress
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedsilo.strategies.wire.signatures import fingerprint

Runner = Callable[..., Any]
SCRIPT = "make-secrets.sh"


@pytest.fixture
def secrets(made_secrets: Path, tmp_path: Path) -> Path:
    """Return a copy of the made secrets that a test may change."""
    return shutil.copytree(made_secrets, tmp_path / "secrets")


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def alternative_names(path: Path) -> tuple[list[str], list[str]]:
    names = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = [str(found) for found in names.get_values_for_type(x509.IPAddress)]
    return names.get_values_for_type(x509.DNSName), addresses


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_folder_holds_what_was_asked_for_and_nothing_else(made_secrets: Path) -> None:
    expected = {"ca.crt", "ca.key", "server.crt", "server.key"}
    expected |= {"north.key", "north.pub", "south.key", "south.pub", "registry.json"}
    assert {file.name for file in made_secrets.iterdir()} == expected


def test_the_registry_has_the_fingerprint_of_each_hospital(made_secrets: Path) -> None:
    entries = json.loads((made_secrets / "registry.json").read_text())
    assert entries == {
        name: {"key": fingerprint((made_secrets / f"{name}.pub").read_bytes())}
        for name in ("north", "south")
    }


def test_only_the_owner_reads_the_files(made_secrets: Path) -> None:
    assert stat.S_IMODE(made_secrets.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in made_secrets.iterdir()} == {0o600}


def test_the_servers_certificate_is_signed_by_the_authority(made_secrets: Path) -> None:
    authority, server = (
        certificate(made_secrets / "ca.crt"),
        certificate(made_secrets / "server.crt"),
    )
    server.verify_directly_issued_by(authority)
    limits = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (limits.ca, limits.path_length) == (True, 0)
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_each_hospital_has_its_own_key_in_the_form_that_flower_loads(made_secrets: Path) -> None:
    numbers = set()
    for name in ("north", "south"):
        key = load_ssh_private_key((made_secrets / f"{name}.key").read_bytes(), None)
        public = load_ssh_public_key((made_secrets / f"{name}.pub").read_bytes())
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert isinstance(public, ec.EllipticCurvePublicKey)
        assert key.curve.name == "secp384r1"
        assert key.public_key() == public
        numbers.add(public.public_numbers())
    assert len(numbers) == 2


def test_hosts_are_names_or_addresses_and_the_loopback_is_added(
    script: Runner, tmp_path: Path
) -> None:
    hosts = ("--host", "fl.example.org", "--host", "10.0.0.5", "--host", "fd00::5")
    done = script(SCRIPT, "--out", tmp_path / "s", *hosts, "--hospital", "a")
    assert done.returncode == 0, done.stderr
    names, addresses = alternative_names(tmp_path / "s" / "server.crt")
    assert names == ["localhost", "fl.example.org"]
    assert addresses == ["127.0.0.1", "10.0.0.5", str(ipaddress.ip_address("fd00::5"))]


def test_the_end_is_as_asked_for_and_is_printed(script: Runner, tmp_path: Path) -> None:
    given = ("--host", "server", "--hospital", "a", "--days", "30")
    done = script(SCRIPT, "--out", tmp_path / "s", *given)
    end = certificate(tmp_path / "s" / "server.crt").not_valid_after_utc
    left = end - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=29, hours=23) < left <= datetime.timedelta(days=30)
    assert f"server.crt ends {end:%b} {end.day:2d} {end:%H:%M:%S %Y} GMT" in done.stdout
    assert "ca.crt ends " in done.stdout
    assert "PRIVATE" not in done.stdout + done.stderr


def test_nothing_is_overwritten(script: Runner, secrets: Path) -> None:
    before = contents(secrets)
    done = script(SCRIPT, "--out", secrets, "--host", "server", "--hospital", "north")
    assert done.returncode == 2
    assert "is not empty and nothing is overwritten" in done.stderr
    assert contents(secrets) == before


def test_an_empty_folder_may_be_filled(script: Runner, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o755)
    done = script(SCRIPT, "--out", tmp_path / "s", "--host", "h", "--hospital", "a")
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700


def test_a_call_that_fails_half_way_leaves_nothing_behind(script: Runner, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ssh-keygen").write_text("#!/bin/sh\necho no entropy >&2\nexit 1\n")
    (tools / "ssh-keygen").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    given = ("--out", tmp_path / "s", "--host", "h", "--hospital", "a")
    done = script(SCRIPT, *given, PATH=path)
    assert done.returncode == 2
    assert "ssh-keygen failed: no entropy" in done.stderr
    assert [found.name for found in tmp_path.iterdir()] == ["bin"]


def test_renewal_keeps_authority_key_and_names(script: Runner, secrets: Path) -> None:
    before, old = contents(secrets), certificate(secrets / "server.crt")
    done = script(SCRIPT, "--out", secrets, "--renew-server", "--days", "900")
    assert done.returncode == 0, done.stderr
    after, new = contents(secrets), certificate(secrets / "server.crt")
    assert {name for name in after if after[name] != before.get(name)} == {"server.crt"}
    assert new.not_valid_after_utc > old.not_valid_after_utc
    assert new.serial_number != old.serial_number
    assert alternative_names(secrets / "server.crt") == (["localhost", "server"], ["127.0.0.1"])
    new.verify_directly_issued_by(certificate(secrets / "ca.crt"))


def test_renewal_takes_new_names(script: Runner, secrets: Path) -> None:
    done = script(SCRIPT, "--out", secrets, "--renew-server", "--host", "new.example.org")
    assert done.returncode == 0, done.stderr
    assert alternative_names(secrets / "server.crt")[0] == ["localhost", "new.example.org"]


def test_a_server_never_outlives_its_authority(script: Runner, secrets: Path) -> None:
    before = contents(secrets)
    done = script(SCRIPT, "--out", secrets, "--renew-server", "--days", "4000")
    assert done.returncode == 2
    assert "--days 4000 ends after the authority" in done.stderr
    assert contents(secrets) == before


def test_renewal_needs_the_authoritys_key(script: Runner, secrets: Path) -> None:
    (secrets / "ca.key").unlink()
    done = script(SCRIPT, "--out", secrets, "--renew-server")
    assert done.returncode == 2
    assert "ca.crt or ca.key is missing" in done.stderr


def test_a_hospital_is_added_without_touching_the_others(script: Runner, secrets: Path) -> None:
    before = contents(secrets)
    done = script(SCRIPT, "--out", secrets, "--add-hospital", "west")
    assert done.returncode == 0, done.stderr
    after = contents(secrets)
    registry = json.loads(after.pop("registry.json")), json.loads(before.pop("registry.json"))
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"west.key", "west.pub"}
    assert registry[0] == {
        **registry[1],
        "west": {"key": fingerprint((secrets / "west.pub").read_bytes())},
    }
    assert stat.S_IMODE((secrets / "west.key").stat().st_mode) == 0o600


def test_a_hospital_that_is_there_keeps_its_key(script: Runner, secrets: Path) -> None:
    before = contents(secrets)
    names = ("--add-hospital", "west", "--add-hospital", "north")
    done = script(SCRIPT, "--out", secrets, *names)
    assert done.returncode == 2
    assert "north.key or .pub exists" in done.stderr
    assert contents(secrets) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_an_owner_gets_all_but_the_authoritys_key(script: Runner, tmp_path: Path) -> None:
    given = ("--out", tmp_path / "s", "--host", "h", "--hospital", "a", "--owner", "10001")
    assert script(SCRIPT, *given).returncode == 0
    assert script(SCRIPT, "--out", tmp_path / "s", "--renew-server").returncode == 0
    assert script(SCRIPT, "--out", tmp_path / "s", "--add-hospital", "b").returncode == 0
    owners = {file.name: file.stat().st_uid for file in (tmp_path / "s").iterdir()}
    assert owners.pop("ca.key") == 0
    assert set(owners.values()) == {10001}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--host", "h", "--hospital", "a"), "--out DIR is missing"),
        (("--out", "OUT", "--hospital", "a"), "--host NAME is missing"),
        (("--out", "OUT", "--host", "h"), "--hospital NAME is missing"),
        (("--out", "OUT", "--host", "h", "--hospital"), "--hospital needs a value"),
        (("--out", "OUT", "--host", "h", "--hospital", "../a"), "hospital '../a'"),
        (("--out", "OUT", "--host", "h", "--hospital", "ca"), "hospital 'ca': given twice"),
        (("--out", "OUT", "--host", "h", "--hospital", "a", "--hospital", "a"), "given twice"),
        (("--out", "OUT", "--host", "a,DNS:b", "--hospital", "a"), "host 'a,DNS:b'"),
        (("--out", "OUT", "--host", "h", "--hospital", "a", "--days", "0"), "--days is 0"),
        (("--out", "OUT", "--host", "h", "--hospital", "a", "--days", "x"), "--days is x"),
        (("--out", "OUT", "--host", "h", "--hospital", "a", "--owner", "me"), "--owner is me"),
        (("--out", "OUT", "--force"), "no such option: --force"),
    ],
)
def test_bad_input_is_one_clear_line_and_no_file(
    given: tuple[str, ...], said: str, script: Runner, tmp_path: Path
) -> None:
    done = script(SCRIPT, *(str(tmp_path / "s") if part == "OUT" else part for part in given))
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
