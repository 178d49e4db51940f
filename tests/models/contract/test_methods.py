from types import ModuleType, SimpleNamespace

import pytest

from fedsilo.client_app.methods.base import SiteMethod
from fedsilo.models.contract import methods
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.methods import METHODS, method_part, settings_class
from fedsilo.strategies.loop.method import Method

PARTS = [("models", "Settings"), ("strategies", ""), ("client_app", "Site")]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_three_files_of_one_name(method: str) -> None:
    for room, suffix in PARTS:
        assert method_part(room, method, suffix).__name__.endswith(suffix)
    assert settings_class(method)(), "its settings have defaults"


@pytest.mark.parametrize(("room", "suffix"), PARTS)
def test_a_line_whose_file_lacks_a_class_is_told_with_the_file_and_the_class(
    monkeypatch: pytest.MonkeyPatch, room: str, suffix: str
) -> None:
    monkeypatch.setitem(METHODS, "fedavg", "FedAverage")
    said = f"no class 'FedAverage{suffix}' in {room}/methods/fedavg.py"
    with pytest.raises(SettingError, match=said) as error:
        method_part(room, "fedavg", suffix)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("room", "suffix", "base", "told"),
    [
        ("strategies", "", Method, "no function 'round': write it"),
        ("client_app", "Site", SiteMethod, "no function 'train': write it"),
    ],
)
def test_a_class_without_the_functions_of_every_method_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, room: str, suffix: str, base: type, told: str
) -> None:
    unfinished = type(f"Unfinished{suffix}", (base,), {})
    file = SimpleNamespace(**{unfinished.__name__: unfinished})
    monkeypatch.setitem(METHODS, "unfinished", "Unfinished")
    monkeypatch.setattr(methods, "import_module", lambda name: file)
    with pytest.raises(SettingError) as error:
        method_part(room, "unfinished", suffix)
    assert str(error.value) == (
        f"class 'Unfinished{suffix}' in {room}/methods/unfinished.py has {told}"
    )


def test_a_line_without_its_file_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "fed-new", "FedNew")
    with pytest.raises(SettingError, match=r"no class 'FedNewSettings' in models/methods/fed_new"):
        settings_class("fed-new")


def test_what_a_methods_file_itself_lacks_is_not_blamed_on_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'captum'", name="captum")

    monkeypatch.setattr(methods, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="captum"):
        settings_class("picsr")


def test_a_misspelt_method_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(SettingError, match=r"unknown method 'fedvag'.*did you mean 'fedavg'"):
        settings_class("fedvag")
