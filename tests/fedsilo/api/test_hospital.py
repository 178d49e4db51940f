"""Starting a hospital's node: the confirmation, the process that it becomes, and its keys."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.api import hospital
from fedsilo.client_app.privacy.signing import own_code, signing_key
from fedsilo.client_app.site.node import OWN
from fedsilo.deployment import kit
from fedsilo.deployment.doctor import hospital_checks
from fedsilo.deployment.kit import KitError
from fedsilo.deployment.service import changing
from fedsilo.strategies.wire.signatures import key_code, public_text, simulated_key
from tests.support.errors import refuses


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / OWN / "north"
    signing_key(folder)
    return folder


@pytest.fixture
def become(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Play an opened kit, and return a list of the process that replaces this one."""
    became: list[Any] = []
    setup = SimpleNamespace(
        name="north", key=tmp_path / "node.key", superlink="fl:9092", own_folder=own
    )

    def prepare(request: object, confirm: Callable[[list[str]], None]) -> SimpleNamespace:
        confirm(["the code is ab12", "the hospital allows fedavg"])
        return setup

    monkeypatch.setattr(hospital_checks, "prepare_node", prepare)
    monkeypatch.setattr(
        hospital_checks, "lock_and_build_command", lambda setup, health: ["/bin/node", health]
    )
    monkeypatch.setattr(kit, "read_kit", lambda home: SimpleNamespace(code="ab12"))
    monkeypatch.setattr(os, "execve", lambda *given: became.append(given))
    return became


@pytest.mark.parametrize("answer", ["yes", " YES ", None])
def test_a_confirmed_hospital_becomes_its_node(
    answer: str | None, become: list[Any], own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: answer)
    told: list[str] = []
    hospital.start("north.zip", yes=answer is None, health="h:1", tell=told.append)
    ((path, words, environment),) = become
    assert (path, words) == ("/bin/node", ["/bin/node", "h:1"])
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
    assert told[:2] == ["the code is ab12", "the hospital allows fedavg"]
    assert told[-1].endswith(own_code(own))


@pytest.mark.parametrize("answer", ["no", "", None])
def test_who_does_not_confirm_starts_nothing(
    answer: str | None, become: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(_: str) -> str:
        if answer is None:
            raise EOFError
        return answer

    monkeypatch.setattr("builtins.input", ask)
    with refuses(KitError, "--yes"):
        hospital.start("north.zip")
    assert not become


def test_a_working_folder_that_is_gone_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    hospital._leave_replaced_folder(tmp_path)
    assert Path.cwd() == gone, "it is there"
    gone.rmdir()
    hospital._leave_replaced_folder(tmp_path)
    assert Path.cwd() == tmp_path


def test_keys_are_marked_before_they_are_listed(own: Path, tmp_path: Path) -> None:
    code = key_code(public_text(simulated_key(7, "south")))
    _, south = hospital.keys(tmp_path, compared=[f"south={code}"])
    assert south.split()[:2] == ["south", code]
    assert "SITE=CODE" in hospital.keys(tmp_path, forget=["south"])[1]


def test_a_service_is_changed_as_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def change(folder: Path, options: object, **how: bool) -> str:
        asked.append((folder, how))
        return "unit"

    monkeypatch.setattr(changing, "change_hospital_service", change)
    assert hospital.service("north", uninstall=True) == "unit"
    assert asked == [(Path("north"), {"install": False, "uninstall": True})]
