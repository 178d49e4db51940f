from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fedsilo.client_app.methods.base import SiteMethod
from fedsilo.client_app.site_round import SiteRound
from fedsilo.models.contract.messages import ARRAYS


@pytest.mark.parametrize("method", ["fedavgm", "fedadam"])
def test_a_site_answers_as_fedavgs_does_to_the_bit(
    method: str, opened: Callable[..., SiteMethod], weights: dict[str, Any]
) -> None:
    mine = SiteRound(opened(method, weights)).answer()[ARRAYS]
    fedavgs = SiteRound(opened("fedavg", weights)).answer()[ARRAYS]
    assert set(mine) == set(fedavgs)
    for name in fedavgs:
        assert mine[name].numpy().tobytes() == fedavgs[name].numpy().tobytes()
