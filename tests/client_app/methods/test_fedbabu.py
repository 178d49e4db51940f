from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedsilo.client_app.lab import Lab
from fedsilo.models.contract.messages import ARRAYS
from tests.support.lab import answer

Opened = Callable[..., Lab]
SGD = {"optimiser": "sgd", "learning_rate": 0.05, "weight_decay": 0.1}
HEAD = ["head.4.bias", "head.4.weight"]


def test_the_head_stays_as_it_came_while_there_is_averaging(
    opened: Opened, weights: dict[str, Any]
) -> None:
    sent = {n: a.numpy() for n, a in answer(opened("fedbabu", weights, own=SGD))[ARRAYS].items()}
    assert sent.keys() == weights.keys()
    for name in HEAD:
        np.testing.assert_array_equal(sent[name], weights[name])
    assert (sent["head.1.bias"] != weights["head.1.bias"]).any()


def test_fine_tuning_trains_the_head_too(opened: Opened, weights: dict[str, Any]) -> None:
    answer(opened("fedbabu", weights, own=SGD, returns=False))
    kept = opened("fedbabu", None, own=SGD, round=2, returns=False).state()
    assert all((kept[name].numpy() != weights[name]).any() for name in HEAD)
