from collections.abc import Callable
from typing import Any

import numpy as np

from fedsilo.client_app.lab import Lab
from fedsilo.models.contract.array_names import is_statistic
from fedsilo.models.contract.messages import ARRAYS, METRICS
from tests.support.lab import answer


def test_an_update_is_divided_by_the_steps_and_statistics_are_not(
    opened: Callable[..., Lab], weights: dict[str, Any]
) -> None:
    found = answer(opened("fednova", weights))
    fedavg = answer(opened("fedavg", weights))[ARRAYS]
    assert found[METRICS]["steps"] == 3  # 36 samples in batches of 16, the last of 4
    for name, array in fedavg.items():
        whole = array.numpy()
        part = whole if is_statistic(name) else weights[name] + (whole - weights[name]) / 3
        np.testing.assert_allclose(found[ARRAYS][name].numpy(), part, atol=1e-6)
