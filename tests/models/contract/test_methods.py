import re
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest

from fedsilo.client_app.methods.base import SiteMethod
from fedsilo.models.contract import methods
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.methods import (
    METHODS,
    about,
    method_part,
    needs_sums_only,
    settings_class,
    title_of,
    why_not_private,
)
from fedsilo.models.contract.own_settings import NoSettings, OwnSettings
from fedsilo.models.contract.settings_schema import defaults, setting
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.methods.fedavg import FedAvg
from fedsilo.strategies.methods.registry import strategy_class

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
        ("strategies", "", Method, "no function 'disclosures' and none 'round': write it"),
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


def _plugged(monkeypatch: pytest.MonkeyPatch, **members: object) -> str:
    module = ModuleType("ward.own_method")
    for name, member in members.items():
        setattr(module, name, member)
        if isinstance(member, type):
            member.__module__ = module.__name__
    monkeypatch.setitem(sys.modules, "ward", ModuleType("ward"))
    monkeypatch.setitem(sys.modules, "ward.own_method", module)
    return module.__name__


def _error_of(name: str, part: tuple[str, str]) -> SettingError | None:
    try:
        method_part(part[0], name, part[1])
    except SettingError as error:
        return error
    return None


def _own(base: type, **members: object) -> type:
    return type("Own", (base,), members)


def test_a_plug_without_settings_or_site_has_those_of_the_method_that_it_extends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = _own(method_part("strategies", "fedavgm"))
    name = _plugged(monkeypatch, Own=own)
    assert method_part("strategies", name) is own
    assert settings_class(name) is settings_class("fedavgm")
    assert method_part("client_app", name, "Site") is method_part("client_app", "fedavg", "Site")
    assert (title_of(name), why_not_private(name)) == ("Own", None)


def test_a_plugs_own_settings_are_in_a_group_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Settings(OwnSettings):
        some_factor: float = setting(0.5, "a factor", above=0.0)

    name = _plugged(monkeypatch, Own=_own(FedAvg), OwnSettings=Settings)
    assert list(defaults(settings_class(name))) == ["own-method.some-factor"]
    values = {"method": name, "own-method.some-factor": 0.25}
    settings = resolve(values)
    assert settings.own.some_factor == 0.25
    with pytest.raises(SettingError, match=r"'own-method\.some-factor' is 0; it must be a number"):
        resolve(values | {"own-method.some-factor": 0})
    sent = settings.run_config()
    assert "own-method" not in sent, "Flower knows the keys of pyproject.toml alone"
    assert resolve(sent) == settings


def test_a_plugs_group_that_is_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Taken(OwnSettings):
        group = "fedprox"
        proximal_mu: float = setting(0.5, "another")

    name = _plugged(monkeypatch, Own=_own(FedAvg), OwnSettings=Taken)
    with pytest.raises(SettingError, match="the group 'fedprox' of its settings is taken"):
        resolve({"method": name})


def test_a_plug_with_a_site_of_its_own_says_whether_all_it_sends_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = method_part("client_app", "fedavg", "Site")
    silent, says = _own(site), _own(site, bounded_per_patient=True)
    name = _plugged(monkeypatch, Own=_own(FedAvg), OwnSite=silent)
    assert "does not say that all it sends is bounded per patient" in str(why_not_private(name))
    name = _plugged(monkeypatch, Own=_own(FedAvg), OwnSite=says)
    assert why_not_private(name) is None
    name = _plugged(monkeypatch, Own=_own(method_part("strategies", "fedbn")))
    assert why_not_private(name) == why_not_private("fedbn"), "its site is FedBN's"


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({}, "has 0 classes of Method"),
        ({"One": type("One", (FedAvg,), {}), "Two": type("Two", (FedAvg,), {})}, "has 2 classes"),
        (
            {"Own": type("Own", (Method,), {})},
            "class 'Own' in .* no function 'disclosures' and none 'r",
        ),
        (
            {"Own": type("Own", (FedAvg,), {}), "OwnSite": 3},
            "'OwnSite' of .* not a class of SiteMe",
        ),
    ],
)
def test_a_module_that_is_no_method_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, members: dict[str, object], told: str
) -> None:
    name = _plugged(monkeypatch, **members)
    said = [str(error) for error in map(_error_of, [name] * len(PARTS), PARTS) if error]
    assert said
    assert all(re.search(told, text) and "\n" not in text for text in said)


@pytest.mark.parametrize(
    ("part", "base", "told"),
    [
        (("client_app", "Site"), SiteMethod, "takes class 'OwnSiet' .*: call it 'OwnSite', or '_O"),
        (("models", "Settings"), OwnSettings, "class 'OwnSiet' .*: call it 'OwnSettings', or '_"),
    ],
)
def test_class_of_a_plug_that_no_method_takes_is_refused(
    monkeypatch: pytest.MonkeyPatch, part: tuple[str, str], base: type, told: str
) -> None:
    """Otherwise the method would run with FedAvg's, and nobody would know."""
    members = {"__module__": "ward.own_method"}
    own = {"Own": type("Own", (FedAvg,), members)}
    name = _plugged(monkeypatch, **own, OwnSiet=type("OwnSiet", (base,), members))
    assert re.search(told, str(_error_of(name, part)))
    name = _plugged(monkeypatch, **own, _Common=type("_Common", (base,), members))
    assert _error_of(name, part) is None


class _Undeclared:
    factor: float = 0.5


class _Undecorated:
    factor: float = setting(0.5, "a factor")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            dataclass(frozen=True)(
                type(
                    "A",
                    (_Undeclared, OwnSettings),
                    {"__annotations__": {"factor": float}, "factor": 0.5},
                )
            ),
            "factor",
        ),
        (type("A", (OwnSettings,), dict(vars(_Undecorated))), "factor"),
        (type("A", (NoSettings,), dict(vars(_Undecorated))), "factor"),
        (type("A", (OwnSettings,), {}), ""),
    ],
)
def test_settings_of_a_plug_that_nobody_could_set_are_refused(
    monkeypatch: pytest.MonkeyPatch, settings: type, named: str
) -> None:
    name = _plugged(monkeypatch, Own=_own(FedAvg), OwnSettings=settings)
    said = str(_error_of(name, ("models", "Settings")))
    assert "must be a frozen dataclass, each field declared by setting(default, help)" in said
    assert said.endswith(f": {named}" if named else "help)")


def test_a_class_of_several_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    two = type("Two", (FedAvg,), {})
    name = _plugged(monkeypatch, One=type("One", (FedAvg,), {}), Two=two)
    assert method_part("strategies", f"{name}:Two") is two
    with pytest.raises(SettingError, match=r"'ward\.own_method:three' is 'int', which is no class"):
        method_part("strategies", f"{_plugged(monkeypatch, three=3)}:three")


@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_a_line_about_it(method: str) -> None:
    assert len(about(method)) > 20


def test_sites_and_server_agree_of_which_methods_sums_are_enough() -> None:
    secure = {name for name in METHODS if strategy_class(name).capabilities.secure}
    assert {name for name in METHODS if needs_sums_only(name)} == secure
