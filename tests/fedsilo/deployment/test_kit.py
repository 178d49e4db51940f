"""A kit is read only if it is whole, unaltered and its owner's alone."""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsilo.deployment.kit import Card, KitError, read_kit

Files = dict[str, bytes]


def _rewrite(path: Path, change: Callable[[Files], object]) -> None:
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def _card(**values: object) -> Callable[[Files], object]:
    def change(files: Files) -> None:
        files["kit.json"] = json.dumps(json.loads(files["kit.json"]) | values).encode()

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda f: f.update({"node.key": b"other"}),
            "was altered: node.key does not match the seal",
        ),
        (lambda f: f.update({"ca.crt": b"other"}), "was altered: ca.crt does not match the seal"),
        (_card(server="evil.example.org:9092"), "was altered: kit.json does not match the seal"),
        (_card(server="no address"), "is damaged: kit.json cannot be read"),
        (_card(more=1), "is damaged: kit.json cannot be read"),
        (_card(site="../../etc"), "is damaged: kit.json cannot be read"),
        (lambda f: f.pop("node.key"), "is not a complete kit: it has no node.key"),
        (lambda f: f.update({"../../.bashrc": b""}), "has a file '../../.bashrc', which no kit"),
        (lambda f: f.update({"/etc/passwd": b""}), "has a file '/etc/passwd', which no kit has"),
        (lambda f: f.update({"ca.crt": bytes(2**21)}), "has ca.crt of 2097152 bytes"),
    ],
)
def test_an_altered_kit_is_refused_in_one_line(
    change: Callable[[Files], object], said: str, kit: Path
) -> None:
    _rewrite(kit, change)
    with pytest.raises(KitError) as refused:
        read_kit(kit)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_kit_that_others_may_read_or_that_is_none_is_refused(kit: Path, tmp_path: Path) -> None:
    kit.chmod(0o640)
    with pytest.raises(KitError, match="mode 640, so other users may read the private key in it"):
        read_kit(kit)
    kit.chmod(0o600)
    kit.write_bytes(kit.read_bytes()[:1000])
    with pytest.raises(KitError, match="is not a readable zip"):
        read_kit(kit)
    with pytest.raises(KitError, match="does not exist"):
        read_kit(tmp_path / "none.zip")


@pytest.mark.parametrize(
    ("packing", "place", "damage"),
    [
        (zipfile.ZIP_DEFLATED, 40, b"\xff" * 8),  # zlib.error
        (zipfile.ZIP_STORED, -6, b"\xff\xff\xff\x7f"),  # OSError: a seek to before the beginning
    ],
)
def test_a_zip_damaged_at_any_place_is_refused_in_one_line(
    packing: int, place: int, damage: bytes, kit: Path
) -> None:
    with zipfile.ZipFile(kit) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(kit, "w", packing) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    content = bytearray(kit.read_bytes())
    start = place % len(content)
    content[start : start + len(damage)] = damage
    kit.write_bytes(content)
    with pytest.raises(KitError, match="is not a readable zip") as refused:
        read_kit(kit)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["site.yaml", "registry.json"])
def test_a_kit_that_brings_rules_or_others_keys_is_refused(name: str, kit: Path) -> None:
    _rewrite(kit, lambda files: files.update({name: b"trust: server"}))
    with pytest.raises(KitError, match=rf"has its own {name}.*deploy renew SITE"):
        read_kit(kit)


def test_a_file_that_is_twice_in_a_kit_is_refused(kit: Path) -> None:
    with zipfile.ZipFile(kit, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("node.key", b"another")
    with pytest.raises(KitError, match=r"has node\.key twice"):
        read_kit(kit)


def test_every_byte_of_a_kit_is_under_its_code(kit: Path) -> None:
    """Whatever is altered, the kit is refused or its code is another one."""
    whole = read_kit(kit)
    for name in whole.files:
        if name == "kit.json":
            continue
        content = whole.files[name]
        _rewrite(kit, lambda files, name=name: files.update({name: files[name] + b" "}))  # type: ignore[misc]
        with pytest.raises(KitError, match="does not match the seal"):
            read_kit(kit)
        _rewrite(kit, lambda files, name=name, content=content: files.update({name: content}))  # type: ignore[misc]
    for key, value in (("node-id", "8"), ("made", "2027-01-01"), ("server", "a:1"), ("site", "b")):
        card = json.loads(whole.files["kit.json"]) | {key: value}
        other = Card.model_validate(card)
        card["seal"] = other.compute_seal()  # by somebody who knows how kits are sealed
        _rewrite(
            kit, lambda files, card=card: files.update({"kit.json": json.dumps(card).encode()})
        )  # type: ignore[misc]
        assert read_kit(kit).code != whole.code


def test_a_pipe_in_place_of_a_kit_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "north.zip", 0o600)
    with pytest.raises(KitError, match="not a regular file"):
        read_kit(tmp_path / "north.zip")


def test_unzip_gives_the_files_to_their_owner_alone(kit: Path) -> None:
    with zipfile.ZipFile(kit) as archive:
        assert {entry.external_attr >> 16 for entry in archive.infolist()} == {0o100600}
