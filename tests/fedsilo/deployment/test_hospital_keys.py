"""``fedsilo hospital keys``: which folder has the keys, and what each line of the list says."""

from pathlib import Path

import pytest

from fedsilo.client_app.privacy.signing import KnownKeys, own_code, signing_key
from fedsilo.client_app.site.node import OWN
from fedsilo.core.errors import RefusedError, SettingError
from fedsilo.deployment.hospital_keys import describe_keys, find_own_folder, mark_keys
from fedsilo.strategies.wire.signatures import key_code, public_text, simulated_key
from tests.support.errors import refuses


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return the folder of the hospital north, which has made its key."""
    folder = tmp_path / OWN / "north"
    signing_key(folder)
    return folder


def _code(site: str) -> str:
    return key_code(public_text(simulated_key(7, site)))


def test_the_folder_is_found_from_a_state_dir_an_opened_kit_and_itself(
    own: Path, tmp_path: Path
) -> None:
    assert find_own_folder(tmp_path) == find_own_folder(own) == own
    kit = tmp_path / "kit"
    inside = kit / "state" / OWN / "south"
    signing_key(inside)
    assert find_own_folder(kit) == inside


def test_a_folder_without_a_key_or_with_several_is_refused(own: Path, tmp_path: Path) -> None:
    with refuses(SettingError, tmp_path / "none", "state-dir"):
        find_own_folder(tmp_path / "none")
    signing_key(tmp_path / OWN / "south")
    with refuses(SettingError, "north", "south"):
        find_own_folder(tmp_path)


def test_the_list_names_the_own_key_and_asks_for_those_not_compared(own: Path) -> None:
    own_line, hint = describe_keys(own)
    assert own_line.split()[:2] == ["north", own_code(own)]
    assert "SITE=CODE" in hint
    with refuses(RefusedError, "south"):
        KnownKeys(own).refuse_uncompared("north", "", {"south": _code("south")})
    _, south = describe_keys(own)
    assert south.split()[:2] == ["south", _code("south")]
    assert "NOT COMPARED" in south


def test_a_key_is_compared_changed_and_forgotten(own: Path) -> None:
    mark_keys(own, [f"south={_code('south')}"], [])
    _, compared = describe_keys(own)
    assert compared.split()[:2] == ["south", _code("south")]
    assert "NOT COMPARED" not in compared
    with refuses(RefusedError, "south", _code("other")):
        KnownKeys(own).refuse_uncompared("north", "", {"south": _code("other")})
    _, changed = describe_keys(own)
    assert changed.split()[1] == _code("other")
    assert f"ANOTHER KEY than {_code('south')}" in changed
    mark_keys(own, ["south"], [])  # the changed key, which was listed
    assert KnownKeys(own).read()["south"].compared == _code("other")
    mark_keys(own, [], ["south"])
    assert not KnownKeys(own).read()


def test_a_hospital_does_not_compare_its_own_key(own: Path) -> None:
    with refuses(SettingError, "north"):
        mark_keys(own, [f"north={own_code(own)}"], [])
    with refuses(SettingError, "south"):
        mark_keys(own, [], ["south"])
