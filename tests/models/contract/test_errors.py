from fedsilo.models.contract import errors
from fedsilo.models.contract.errors import ERROR_CODES, EpsilonSpentError, FedsiloError, SiteError


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
