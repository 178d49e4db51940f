import pytest

from fedsilo.core import errors
from fedsilo.core.errors import (
    ERROR_CODES,
    EpsilonSpentError,
    FedsiloError,
    SettingError,
    SiteError,
    error_line,
    needs_extra,
)


def test_each_kind_of_error_has_a_code_of_its_own() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, FedsiloError) and kind is not FedsiloError
    ]
    codes = [kind.code for kind in kinds]
    assert all(codes)
    assert len(set(codes)) == len(codes)
    assert ERROR_CODES.keys() <= set(codes)


def test_numbers_on_the_wire_are_told_apart_and_are_none_of_flowers() -> None:
    assert len(set(ERROR_CODES.values())) == len(ERROR_CODES)
    assert min(ERROR_CODES.values()) > 1000


def test_spent_epsilon_is_a_sites_refusal_and_so_a_sites_error() -> None:
    error = EpsilonSpentError("no more")
    assert isinstance(error, SiteError)
    assert (error.code, str(error)) == ("epsilon-spent", "no more")


def test_a_missing_package_of_an_extra_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(SettingError) as told, needs_extra("a table", "tables", "leave it out"):
        import there_is_no_such_package  # noqa: F401
    assert str(told.value) == (
        "a table needs the extra 'tables': pip install 'fedsilo[tables]', or leave it out"
    )


def test_another_error_than_a_missing_package_passes() -> None:
    with pytest.raises(ZeroDivisionError), needs_extra("a table", "tables"):
        raise ZeroDivisionError


def test_an_error_line_has_the_code() -> None:
    assert error_line(SettingError("rounds is 0")) == "fedsilo: error[setting]: rounds is 0"
    assert error_line(FedsiloError("x")) == "fedsilo: error: x"
