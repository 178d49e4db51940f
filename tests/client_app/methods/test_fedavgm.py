from collections.abc import Callable
from typing import Any

import pytest

from fedsilo.client_app.lab import Lab
from fedsilo.models.contract.messages import ARRAYS
from tests.support.lab import answer


@pytest.mark.parametrize("method", ["fedavgm", "fedadam"])
def test_a_site_answers_as_fedavgs_does_to_the_bit(
    method: str, opened: Callable[..., Lab], weights: dict[str, Any]
) -> None:
    mine = answer(opened(method, weights))[ARRAYS]
    fedavgs = answer(opened("fedavg", weights))[ARRAYS]
    assert set(mine) == set(fedavgs)
    for name in fedavgs:
        assert mine[name].numpy().tobytes() == fedavgs[name].numpy().tobytes()
