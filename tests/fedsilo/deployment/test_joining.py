"""Hospitals that are added, renewed and revoked: both registrations, the kit, and refusals."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509

from fedsilo.core.errors import FedsiloError
from fedsilo.deployment import joining
from fedsilo.deployment.certificates import sign_server
from fedsilo.deployment.commands import hospital_address
from fedsilo.deployment.deployment import (
    Deployment,
    DeploymentError,
    key_fingerprint,
    read_deployment,
)
from fedsilo.deployment.joining import add, renew, revoke
from fedsilo.deployment.kit import AUTHORITY, KEY, read_kit
from fedsilo.server_app.config.operator_files import read_registry
from fedsilo.strategies.meeting.terms import Registry


def test_add_writes_both_registrations_and_kits_without_rules_or_others_keys(
    deployment: Deployment, superlink: SimpleNamespace
) -> None:
    made = add(deployment.folder, ["north", "south"], print)
    assert read_deployment(deployment.folder).hospitals == ["north", "south"]
    assert read_registry(deployment.registry).nodes == {"north": 100, "south": 101}
    for one in made:
        public = deployment.secrets / f"{one.site}.pub"
        assert superlink.keys[read_deployment(deployment.folder).nodes[one.site]] == (
            public.read_bytes()
        )
        kit = read_kit(one.path)
        assert (kit.card.site, kit.card.server) == (one.site, "fl.example.org:443")
        assert kit.files[AUTHORITY] == (deployment.secrets / "ca.crt").read_bytes()
        assert json.loads(deployment.registry.read_text())[one.site]["key"] == key_fingerprint(
            public
        )
        assert kit.files.keys() == {"ca.crt", "node.key", "README.txt", "kit.json"}
        assert one.code == kit.code


def test_private_keys_are_their_owners_alone_and_a_hospitals_leaves_with_the_kit(
    deployment: Deployment, kit: Path
) -> None:
    assert kit.stat().st_mode & 0o777 == 0o600
    assert kit.parent.stat().st_mode & 0o777 == 0o700
    private = read_kit(kit).files[KEY]
    for path in deployment.folder.rglob("*"):
        if path.is_file() and path != kit:
            assert private not in path.read_bytes()
    assert all(path.stat().st_mode & 0o077 == 0 for path in deployment.secrets.iterdir())


def test_renew_gives_another_key_and_unregisters_the_old(
    deployment: Deployment, kit: Path, superlink: SimpleNamespace
) -> None:
    before = read_kit(kit)
    made = renew(deployment.folder, "north", print)
    assert not isinstance(made, str)
    after = read_kit(made.path)
    assert made.path == kit
    assert after.files[KEY] != before.files[KEY]
    assert after.card.made > before.card.made
    assert sorted(superlink.keys) == ["101", "102"]
    assert read_registry(deployment.registry).nodes == {"north": 102, "south": 101}


def test_renew_that_cannot_register_the_new_key_changes_nothing(
    deployment: Deployment,
    kit: Path,
    superlink: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def contents() -> dict[Path, bytes]:
        files = [path for path in deployment.folder.rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in files}

    def refuse(deployment: Deployment, *words: str, say: object = None) -> dict[str, str]:
        if words[1] == "register":
            raise DeploymentError("the SuperLink is full")
        answer: dict[str, str] = superlink.flwr(deployment, *words)
        return answer

    before, keys = contents(), dict(superlink.keys)
    monkeypatch.setattr(joining, "flwr", refuse)
    with pytest.raises(DeploymentError, match="the SuperLink is full"):
        renew(deployment.folder, "north", print)
    assert (contents(), superlink.keys) == (before, keys)


def test_renew_that_cannot_remove_the_old_key_says_that_it_works_and_how_to_remove_it(
    deployment: Deployment,
    kit: Path,
    superlink: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(deployment: Deployment, *words: str, say: object = None) -> dict[str, str]:
        if words[1] == "unregister":
            raise DeploymentError("the connection broke")
        answer: dict[str, str] = superlink.flwr(deployment, *words)
        return answer

    with monkeypatch.context() as broken:
        broken.setattr(joining, "flwr", refuse)
        with pytest.raises(DeploymentError, match="the connection broke") as caught:
            renew(deployment.folder, "north", print)
    assert "100" in superlink.keys
    assert "'flwr supernode unregister 100 fedsilo'" in str(caught.value)

    renew(deployment.folder, "north", print)
    assert read_registry(deployment.registry).nodes == {"north": 103, "south": 101}
    assert sorted(superlink.keys) == ["100", "101", "103"]


def test_revoke_removes_both_registrations_kit_and_key_and_frees_the_name(
    deployment: Deployment, kit: Path, superlink: SimpleNamespace
) -> None:
    revoke(deployment.folder, "north", print)
    assert list(superlink.keys) == ["101"]
    assert read_registry(deployment.registry).nodes == {"south": 101}
    assert read_deployment(deployment.folder).hospitals == ["south"]
    assert not kit.exists()
    assert not (deployment.secrets / "north.pub").exists()
    add(deployment.folder, ["north"], print)
    assert read_deployment(deployment.folder).hospitals == ["north", "south"]


def test_revoke_that_was_cut_short_is_repeated(
    deployment: Deployment, kit: Path, superlink: SimpleNamespace
) -> None:
    del superlink.keys["100"]
    revoke(deployment.folder, "north", print)
    assert read_deployment(deployment.folder).hospitals == ["south"]


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("action", "names", "said"),
    [
        (add, ["north"], "site 'north' exists in"),
        (add, ["east", "east"], "site 'east' is named twice"),
        (add, ["../east"], "'../east' cannot be a site's name"),
        (add, ["server"], "'server' cannot be a site's name"),
        (revoke, "nort", "unknown site of the deployment 'nort'; did you mean 'north'?"),
        (renew, "east", "unknown site of the deployment 'east'"),
    ],
)
def test_bad_names_are_refused_and_nothing_is_written(
    action: object,
    names: object,
    said: str,
    deployment: Deployment,
    kit: Path,
    superlink: SimpleNamespace,
) -> None:
    before, keys = _files(deployment.folder), dict(superlink.keys)
    with pytest.raises(FedsiloError) as refused:
        action(deployment.folder, names, print)  # type: ignore[operator]
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert (_files(deployment.folder), superlink.keys) == (before, keys)


def test_a_server_that_does_not_answer_changes_nothing(
    deployment: Deployment, kit: Path, superlink: SimpleNamespace
) -> None:
    superlink.answers = False
    before = _files(deployment.folder)
    for action, names in ((add, ["east"]), (renew, "north"), (revoke, "north")):
        with pytest.raises(
            DeploymentError, match="does not answer: start it by 'fedsilo deploy up'"
        ):
            action(deployment.folder, names, print)  # type: ignore[operator]
    assert _files(deployment.folder) == before


def test_renew_server_signs_the_same_key_for_the_same_hosts(deployment: Deployment) -> None:
    path = deployment.secrets / "server.crt"
    first = x509.load_pem_x509_certificate(path.read_bytes())
    said = renew(deployment.folder, "server", print)
    second = x509.load_pem_x509_certificate(path.read_bytes())
    assert isinstance(said, str)
    assert "hospitals need not do anything" in said
    assert second.serial_number != first.serial_number
    assert second.public_key() == first.public_key()
    for one in (first, second):
        one.verify_directly_issued_by(
            x509.load_pem_x509_certificate((deployment.secrets / "ca.crt").read_bytes())
        )
        names = one.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == ["localhost", "fl.example.org"]
    assert timedelta(363) < second.not_valid_after_utc - datetime.now(UTC) < timedelta(366)


def test_renewal_of_the_server_without_its_authority_key_says_what_is_missing(
    deployment: Deployment,
) -> None:
    (deployment.secrets / "ca.key").unlink()
    with pytest.raises(DeploymentError, match=r"put ca\.crt, ca\.key"):
        sign_server(deployment.secrets)


@pytest.mark.parametrize("host", ["", "a b", "fl.example.org:x", "fl.example.org:70000", "::1"])
def test_a_host_that_is_none_is_refused(host: str) -> None:
    if not host:
        assert hospital_address(host) == ""
        return
    with pytest.raises(FedsiloError, match="--host must be a name or an address"):
        hospital_address(host)


def test_a_host_gets_flowers_port_unless_it_has_one() -> None:
    assert hospital_address("fl.example.org") == "fl.example.org:9092"
    assert hospital_address("10.0.0.1:443") == "10.0.0.1:443"


def test_the_refusal_of_a_node_without_a_line_names_that_registration() -> None:
    said = Registry("registry.json", {"north": 5}).fault(6, "south")
    assert said is not None
    assert "its key is registered at the SuperLink" in said
    assert "its line in registry.json is missing" in said
