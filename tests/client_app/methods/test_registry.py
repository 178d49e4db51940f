import pytest

from fedsilo.client_app.methods.base import SiteMethod
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.methods import METHODS, site_class


@pytest.mark.parametrize("method", METHODS)
def test_every_registered_method_can_be_opened_at_a_site(method: str) -> None:
    cls = site_class(method)
    assert issubclass(cls, SiteMethod)
    assert not getattr(cls, "__abstractmethods__", None)


def test_a_method_that_no_site_knows_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"unknown method 'uelf'; did you mean 'uefl'"):
        site_class("uelf")
