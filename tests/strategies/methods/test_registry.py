import pytest

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.methods import METHODS, settings_class, title_of
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.strategies.loop.method import Method
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.registry import strategy_class


@pytest.mark.parametrize("method", METHODS)
def test_every_method_says_its_name_and_what_leaves_the_site(
    method: str, participants: Participants
) -> None:
    cls = strategy_class(method)
    assert issubclass(cls, Method)
    assert title_of(method)
    told = cls(CommonSettings(), settings_class(method)(), participants).disclosures().leaves
    assert all(told)
    assert bool(told) is (method != "local")  # whose sites send metrics alone


def test_a_misspelt_method_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(SettingError, match=r"unknown method 'fedvag'.*did you mean 'fedavg'"):
        strategy_class("fedvag")
