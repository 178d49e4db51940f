import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest

from fedsilo.client_app.methods.base import SiteMethod
from fedsilo.core import methods
from fedsilo.core.errors import SettingError
from fedsilo.core.methods import (
    METHODS,
    Entry,
    about,
    class_name,
    needs_sums_only,
    server_class,
    settings_class,
    site_class,
    title_of,
    why_not_private,
)
from fedsilo.core.settings.own_settings import NoSettings, OwnSettings
from fedsilo.core.settings.written_settings import flat_values
from fedsilo.core.settings_schema import defaults, setting
from fedsilo.server_app.config.settings import resolve
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.methods.fedavg import FedAvg

PARTS = [settings_class, server_class, site_class]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_says_what_it_is_in_its_own_settings_class(method: str) -> None:
    settings = settings_class(method)
    assert {"title", "server", "site"} <= vars(settings).keys(), "not those of the class it extends"
    assert settings.__name__ == f"{class_name(method)}Settings"
    assert settings(), "its settings have defaults"
    assert issubclass(server_class(method), Method)
    assert issubclass(site_class(method), SiteMethod)


def test_no_two_methods_have_one_title_or_one_description() -> None:
    assert len({title_of(name) for name in METHODS}) == len(METHODS)
    assert len({about(name) for name in METHODS}) == len(METHODS)


def test_a_new_method_is_one_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class has all that fedsilo must know to run it, list it and judge its privacy."""

    @dataclass(frozen=True)
    class FedNewSettings(OwnSettings):
        title = "FedNew"
        server = "fedsilo.strategies.methods.fedavg:FedAvg"
        site = "fedsilo.client_app.methods.fedavg:FedAvgSite"
        why_not_private = "is a test"
        sums_suffice = True

    monkeypatch.setitem(sys.modules, "ward", SimpleNamespace(FedNewSettings=FedNewSettings))
    monkeypatch.setitem(METHODS, "fed-new", Entry("ward:FedNewSettings", "FedNew: a test."))
    assert resolve({"method": "fed-new"}).own == FedNewSettings()
    assert (class_name("fed-new"), title_of("fed-new")) == ("FedNew", "FedNew")
    assert (about("fed-new"), why_not_private("fed-new")) == ("FedNew: a test.", "is a test")
    assert needs_sums_only("fed-new")
    assert site_class("fed-new") is site_class("fedavg")


def test_a_line_that_names_no_class_is_told_with_the_method_and_the_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(METHODS, "fedavg", Entry("fedsilo.models.methods.fedavg:FedAverage", ""))
    with pytest.raises(SettingError, match=r"'fedavg' .*names '.*fedavg:FedAverage'") as error:
        settings_class("fedavg")
    assert "\n" not in str(error.value)
    monkeypatch.setitem(METHODS, "fed-new", Entry("fedsilo.models.methods.fed_new:FedNew", ""))
    with pytest.raises(SettingError, match=r"'fed-new' .*fed_new:FedNew', but there is no such"):
        settings_class("fed-new")


@pytest.mark.parametrize(("side", "part"), [("server", server_class), ("site", site_class)])
def test_a_side_that_is_missing_is_told_with_the_class_that_names_it(
    monkeypatch: pytest.MonkeyPatch, side: str, part: Callable[[str], type]
) -> None:
    monkeypatch.setattr(settings_class("fedprox"), side, "fedsilo.models.nowhere:FedProx")
    with pytest.raises(SettingError, match=f"'{side}' of class 'FedProxSettings' names 'fedsilo"):
        part("fedprox")


@pytest.mark.parametrize(
    ("side", "part", "base", "told"),
    [
        ("server", server_class, Method, "functions 'disclosures' and 'round'"),
        ("site", site_class, SiteMethod, "function 'train'"),
    ],
)
def test_a_class_without_the_functions_of_every_method_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
    side: str,
    part: Callable[[str], type],
    base: type,
    told: str,
) -> None:
    unfinished = type("Unfinished", (base,), {})
    monkeypatch.setitem(sys.modules, "ward", SimpleNamespace(Unfinished=unfinished))
    monkeypatch.setattr(settings_class("fedprox"), side, "ward:Unfinished")
    with pytest.raises(SettingError) as error:
        part("fedprox")
    assert str(error.value) == f"class 'Unfinished' in ward must define the {told}"


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


def _error_of(name: str, part: Callable[[str], type]) -> SettingError | None:
    try:
        part(name)
    except SettingError as error:
        return error
    return None


def _own(base: type, **members: object) -> type:
    return type("Own", (base,), members)


def test_a_plug_without_settings_or_site_has_those_of_the_method_that_it_extends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = _own(server_class("fedavgm"))
    name = _plugged(monkeypatch, Own=own)
    assert server_class(name) is own
    assert settings_class(name) is settings_class("fedavgm")
    assert site_class(name) is site_class("fedavg")
    assert (title_of(name), why_not_private(name)) == ("Own", None)


def test_a_plugs_own_settings_are_in_a_group_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Settings(OwnSettings):
        some_factor: float = setting(0.5, "a factor", gt=0.0)

    name = _plugged(monkeypatch, Own=_own(FedAvg), OwnSettings=Settings)
    assert list(defaults(settings_class(name))) == ["own-method.some-factor"]
    values = {"method": name, "own-method.some-factor": 0.25}
    settings = resolve(values)
    assert settings.own.some_factor == 0.25
    with pytest.raises(SettingError, match=r"'own-method\.some-factor' must be above 0, but is 0"):
        resolve(values | {"own-method.some-factor": 0})
    sent = settings.run_config()
    assert "own-method" not in sent, "Flower knows the keys of pyproject.toml alone"
    assert resolve(flat_values(sent)) == settings


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
    site = site_class("fedavg")
    silent, says = _own(site), _own(site, bounded_per_patient=True)
    name = _plugged(monkeypatch, Own=_own(FedAvg), OwnSite=silent)
    assert "does not say that all it sends is bounded per patient" in str(why_not_private(name))
    name = _plugged(monkeypatch, Own=_own(FedAvg), OwnSite=says)
    assert why_not_private(name) is None
    name = _plugged(monkeypatch, Own=_own(server_class("fedbn")))
    assert why_not_private(name) == why_not_private("fedbn"), "its site is FedBN's"


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({}, "has 0 classes of Method"),
        ({"One": type("One", (FedAvg,), {}), "Two": type("Two", (FedAvg,), {})}, "has 2 classes"),
        (
            {"Own": type("Own", (Method,), {})},
            "class 'Own' in .* must define the functions 'disclosures' and 'r",
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
        (site_class, SiteMethod, "takes class 'OwnSiet' .*: call it 'OwnSite', or '_O"),
        (settings_class, OwnSettings, "class 'OwnSiet' .*: call it 'OwnSettings', or '_"),
    ],
)
def test_class_of_a_plug_that_no_method_takes_is_refused(
    monkeypatch: pytest.MonkeyPatch, part: Callable[[str], type], base: type, told: str
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
    said = str(_error_of(name, settings_class))
    assert "must be a frozen dataclass, each field declared by setting(default, help)" in said
    assert said.endswith(f": {named}" if named else "help)")


def test_a_class_of_several_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    two = type("Two", (FedAvg,), {})
    name = _plugged(monkeypatch, One=type("One", (FedAvg,), {}), Two=two)
    assert server_class(f"{name}:Two") is two
    with pytest.raises(SettingError, match=r"'ward\.own_method:three' must be a class.* is 'int'"):
        server_class(f"{_plugged(monkeypatch, three=3)}:three")


@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_a_line_about_it(method: str) -> None:
    assert len(about(method)) > 20


def test_a_plugin_needs_sums_as_it_says_or_as_the_method_that_it_extends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass(frozen=True)
    class Silent(OwnSettings):
        some_factor: float = setting(0.5, "a factor", gt=0.0)

    @dataclass(frozen=True)
    class Says(OwnSettings):
        sums_suffice = False

    for settings, expected in ((Silent, True), (Says, False)):
        name = _plugged(monkeypatch, Own=_own(FedAvg), OwnSettings=settings)
        assert needs_sums_only(name) is expected
    name = _plugged(monkeypatch, Own=_own(server_class("uefl")))
    assert not needs_sums_only(name)


def test_a_plugin_has_the_title_that_its_settings_class_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass(frozen=True)
    class Settings(OwnSettings):
        title = "My method"

    name = _plugged(monkeypatch, Own=_own(FedAvg), OwnSettings=Settings)
    assert title_of(name) == "My method"
