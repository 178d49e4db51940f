from __future__ import annotations

import pytest

import client_app.methods.registry
from models.contract.errors import SettingError
from models.contract.settings import CommonSettings
from strategies.loop.federated_strategy import FederatedStrategy
from strategies.loop.roster import Roster
from strategies.methods.registry import METHODS, strategy_class


@pytest.mark.parametrize("method", METHODS)
def test_every_method_says_its_name_and_what_leaves_the_site(method: str, roster: Roster) -> None:
    cls = strategy_class(method)
    assert issubclass(cls, FederatedStrategy)
    assert cls.title
    told = cls(CommonSettings(), cls.settings_class(), roster).leaves()
    assert all(told)
    assert bool(told) is (method != "local")  # whose sites send metrics alone


@pytest.mark.parametrize("method", METHODS)
def test_server_and_site_agree_on_a_methods_settings(method: str) -> None:
    site = client_app.methods.registry.method_class(method)
    assert strategy_class(method).settings_class is site.settings_class


def test_server_and_sites_know_the_same_methods() -> None:
    assert set(METHODS) == set(client_app.methods.registry.METHODS)


def test_a_misspelt_method_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(SettingError, match=r"unknown method 'fedvag'.*did you mean 'fedavg'"):
        strategy_class("fedvag")
