"""Whose keys a hospital takes for whose, by its own key and its own list of compared ones."""

import json
from pathlib import Path

import pytest

from fedsilo.client_app.privacy.signing import (
    KEY,
    KNOWN,
    KnownKeys,
    SignedKeys,
    Signer,
    own_code,
    signer_of,
    signing_key,
)
from fedsilo.client_app.site.node import OWN
from fedsilo.core.errors import CheckpointError, RefusedError, SettingError
from fedsilo.core.settings_schema import Value
from fedsilo.strategies.wire.signatures import key_code, public_text, sign_text, simulated_key
from tests.support.errors import refuses


@pytest.fixture
def node(tmp_path: Path) -> dict[str, Value]:
    return {"state-dir": str(tmp_path)}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / OWN / "north"


def _signed(site: str, words: bytes = b"keys", said: bytes = b"keys") -> SignedKeys:
    """Return what a site says that signs by a key of its own."""
    private = simulated_key(7, site)
    return SignedKeys(site, public_text(private), said, sign_text(private, words))


def _code(site: str) -> str:
    return key_code(public_text(simulated_key(7, site)))


def refused(signer: Signer, *received: SignedKeys) -> str:
    try:
        signer.refuse_unsigned(received)
    except RefusedError as error:
        return str(error)
    return ""


def test_a_key_is_made_once_for_its_owner_alone(own: Path) -> None:
    assert own_code(own) == ""
    first = public_text(signing_key(own))
    assert public_text(signing_key(own)) == first
    assert (own / KEY).stat().st_mode & 0o777 == 0o600
    assert own_code(own) == key_code(first)


def test_a_key_is_taken_once_it_was_compared_and_no_other(
    node: dict[str, Value], own: Path
) -> None:
    signer = signer_of(False, 0, "north", node)
    mine = SignedKeys(
        "north", public_text(signer.private), b"keys", sign_text(signer.private, b"keys")
    )
    said = refused(signer, mine, _signed("south"), _signed("west"))
    assert "the signing keys of south, west have not been compared" in said
    known = KnownKeys(own)
    assert known.read()["south"].received == _code("south")
    known.show()
    assert known.mark("south") == _code("south")  # the received one, which was listed
    assert known.mark("west", _code("west").upper()) == _code("west")  # as it was read out
    assert not refused(signer, mine, _signed("south"), _signed("west"))

    other = SignedKeys(
        "south", public_text(signer.private), b"keys", sign_text(signer.private, b"keys")
    )
    assert f"but {_code('south')} was compared" in refused(signer, mine, other)
    assert known.read()["south"].compared == _code("south"), "nothing but a yes changes it"
    invented = refused(signer, mine, _signed("south"), _signed("west"), _signed("invented"))
    assert "the signing keys of invented have not been compared" in invented


def test_a_key_under_the_own_name_is_the_own_one(node: dict[str, Value]) -> None:
    signer = signer_of(False, 0, "north", node)
    assert "is not its own" in refused(signer, _signed("north"))


def test_a_signature_of_other_keys_is_refused_and_its_key_not_noted(
    node: dict[str, Value], own: Path
) -> None:
    signer = signer_of(False, 0, "north", node)
    assert "does not match its keys" in refused(signer, _signed("south", said=b"other keys"))
    assert not KnownKeys(own).read()


def test_invented_sites_do_not_fill_the_list(node: dict[str, Value], own: Path) -> None:
    signer = signer_of(False, 0, "north", node)
    key = simulated_key(7, "one")
    public, signature = public_text(key), sign_text(key, b"keys")
    many = [SignedKeys(f"s{number}", public, b"keys", signature) for number in range(500)]
    assert "have not been compared" in refused(signer, *many)
    assert len(KnownKeys(own).read()) == 200


@pytest.mark.parametrize("key", ["signing-key", "site-registry"])
def test_a_node_config_of_the_version_before_says_what_to_do(
    key: str, node: dict[str, Value]
) -> None:
    with refuses(RefusedError, key):
        signer_of(False, 0, "north", node | {key: "/kit/node.key"})


def test_a_hospital_needs_a_place_for_its_key_and_list(node: dict[str, Value], own: Path) -> None:
    with refuses(RefusedError, "state-dir"):
        signer_of(False, 0, "north", {})
    signing_key(own)
    (own / KNOWN).write_text("[1]")
    with refuses(CheckpointError, KNOWN):
        signer_of(False, 0, "north", node).refuse_unsigned([_signed("south")])
    (own / KEY).write_text("no key")
    with pytest.raises(RefusedError, match=r"cannot be used .*bring it back"):
        signer_of(False, 0, "north", node)


@pytest.mark.parametrize("code", ["4f3a", "x" * 39, "-".join(["4f3g"] * 8)])
def test_what_is_no_code_marks_nothing(code: str, own: Path) -> None:
    with pytest.raises(SettingError, match="is not a key's code"):
        KnownKeys(own).mark("south", code)
    with refuses(SettingError, "south"):
        KnownKeys(own).mark("south")
    with pytest.raises(SettingError):
        KnownKeys(own).mark("../south", _code("south"))


def test_a_forgotten_key_must_be_compared_again(node: dict[str, Value], own: Path) -> None:
    known = KnownKeys(own)
    known.mark("south", _code("south"))
    known.forget("south")
    with refuses(SettingError, "south"):
        known.forget("south")
    signer = signer_of(False, 0, "north", node)
    assert "have not been compared" in refused(signer, _signed("south"))
    assert json.loads((own / KNOWN).read_text())["south"]["compared"] == ""


def test_signer_of_a_simulated_site_knows_the_others_by_the_seed() -> None:
    signer = signer_of(True, 7, "north", {})
    assert not refused(signer, _signed("south"))
    assert "not from this run's seed" in refused(signer_of(True, 5, "north", {}), _signed("south"))
