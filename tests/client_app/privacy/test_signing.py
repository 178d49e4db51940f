"""Whose keys a hospital takes for whose, by files on its own disk."""

import json
import subprocess
from pathlib import Path

import pytest

from fedsilo.client_app.privacy.signing import Signer, signer_of
from fedsilo.models.contract.errors import RefusedError
from fedsilo.models.contract.settings_schema import Value
from fedsilo.strategies.wire.signatures import fingerprint, public_text, signed, simulated_key


@pytest.fixture
def node(tmp_path: Path) -> dict[str, Value]:
    make = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(tmp_path / "key")]
    subprocess.run(make, check=True)
    entries = {"north": {"key": fingerprint((tmp_path / "key.pub").read_bytes()), "node-id": "7"}}
    (tmp_path / "registry.json").write_text(json.dumps(entries))
    return {
        "signing-key": str(tmp_path / "key"),
        "site-registry": str(tmp_path / "registry.json"),
    }


def refused(signer: Signer, site: str, public: bytes, words: bytes, signature: bytes) -> str:
    try:
        signer.refuse_unsigned(site, public, words, signature)
    except RefusedError as error:
        return str(error)
    return ""


def test_signer_takes_the_registered_key_of_a_site_and_no_other(node: dict[str, Value]) -> None:
    signer = signer_of(False, 0, "north", node)
    own, strange = signer.private, simulated_key(0, "north")
    assert not refused(signer, "north", public_text(own), b"keys", signed(own, b"keys"))
    said = refused(signer, "north", public_text(strange), b"keys", signed(strange, b"keys"))
    assert "ask that hospital, not the server" in said
    assert "has no line for it" in refused(
        signer, "invented", public_text(strange), b"keys", signed(strange, b"keys")
    )
    assert "does not fit its keys" in refused(
        signer, "north", public_text(own), b"other keys", signed(own, b"keys")
    )


@pytest.mark.parametrize("key", ["signing-key", "site-registry"])
def test_signer_of_a_hospital_needs_both_files(key: str, node: dict[str, Value]) -> None:
    with pytest.raises(RefusedError, match=f"has no '{key}': without it a server could invent"):
        signer_of(False, 0, "north", {k: v for k, v in node.items() if k != key})
    Path(str(node[key])).write_text("[1]")
    with pytest.raises(RefusedError, match=f"'{key}' cannot be used .*repair the file"):
        signer_of(False, 0, "north", node)
    Path(str(node[key])).unlink()
    with pytest.raises(RefusedError, match="FileNotFoundError") as caught:
        signer_of(False, 0, "north", node)
    assert str(node[key]) not in str(caught.value)


def test_signer_of_a_simulated_site_knows_the_others_by_the_seed() -> None:
    signer, other = signer_of(True, 5, "a", {}), simulated_key(5, "b")
    assert not refused(signer, "b", public_text(other), b"keys", signed(other, b"keys"))
    assert refused(signer, "c", public_text(other), b"keys", signed(other, b"keys"))
