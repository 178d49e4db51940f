"""Operations without a deterministic form, by one that PyTorch has none of on the CPU either."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from fedsilo.client_app.training.repeatability import noted_operations
from fedsilo.models.contract.errors import SiteError


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def _put() -> None:
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


@pytest.mark.usefixtures("deterministic")
def test_an_operation_is_named_each_time_and_other_warnings_pass() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as passed, noted_operations() as found:
            _put()
            warnings.warn("something else", stacklevel=1)
        assert found == {"put_"}
        assert [str(warning.message) for warning in passed] == ["something else"]
    with noted_operations() as found:
        torch.ones(2) + 1
    assert found == set()


@pytest.mark.usefixtures("deterministic")
def test_an_operation_is_refused_by_its_name_and_with_the_mend() -> None:
    torch.use_deterministic_algorithms(True)
    with (
        pytest.raises(SiteError, match=r"'put_' has no deterministic form .* set it to 'warn'"),
        noted_operations(),
    ):
        _put()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with noted_operations() as found:  # the mend
        _put()
    assert found == {"put_"}
    with pytest.raises(RuntimeError, match="another"), noted_operations():
        raise RuntimeError("another")
