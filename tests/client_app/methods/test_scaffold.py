from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsilo.client_app.lab import Lab
from fedsilo.models.contract.array_names import arrays_below, with_prefix
from fedsilo.models.contract.messages import ARRAYS, ROUND_KEYS
from tests.support.lab import answer

Opened = Callable[..., Lab]
SGD = {"optimiser": "sgd", "learning_rate": 0.01, "dropout": 0.0}


def controls_of(opened: Opened, weights: dict[str, Any], value: float) -> dict[str, Any]:
    trained = dict(opened("fedavg", weights).open().named_parameters())
    return with_prefix("control/", {n: np.full_like(weights[n], value) for n in trained})


def test_without_controls_the_first_round_is_fedavgs_and_sends_the_mean_gradient(
    opened: Opened, weights: dict[str, Any]
) -> None:
    zeros = controls_of(opened, weights, 0.0)
    found = answer(opened("scaffold", weights | zeros, own=SGD))[ARRAYS]
    fedavg = answer(opened("fedavg", weights, own=SGD))[ARRAYS]
    for name, array in fedavg.items():
        np.testing.assert_allclose(found[name].numpy(), array.numpy(), atol=1e-6)
    steps = 3  # 36 samples in batches of 16: eta c_i = (x - y) / K
    for name in arrays_below("control/", zeros):
        moved = (weights[name] - fedavg[name].numpy()) / steps
        np.testing.assert_allclose(found[f"control/{name}"].numpy(), moved, atol=1e-6)


def test_a_control_that_the_site_has_itself_corrects_nothing(
    opened: Opened, weights: dict[str, Any]
) -> None:
    first = opened("scaffold", weights | controls_of(opened, weights, 0.0), own=SGD)
    sent = {name: array.numpy() for name, array in answer(first)[ARRAYS].items()}
    own = {name: array for name, array in sent.items() if name.startswith("control/")}
    told = {"round": 2, "expects_state": ROUND_KEYS}
    second = answer(opened("scaffold", weights | own, own=SGD, **told))[ARRAYS]
    fedavg = answer(opened("fedavg", weights, own=SGD, round=2))[ARRAYS]
    for name, array in fedavg.items():
        np.testing.assert_allclose(second[name].numpy(), array.numpy(), atol=1e-5)


def test_a_control_of_eta_c_moves_each_weight_by_it_in_each_step(
    opened: Opened, weights: dict[str, Any]
) -> None:
    lone = {**SGD, "local_steps": 1}
    zeros, ones = (controls_of(opened, weights, value) for value in (0.0, 1e-3))
    plain = answer(opened("scaffold", weights | zeros, own=lone))[ARRAYS]
    moved = answer(opened("scaffold", weights | ones, own=lone, round=1))[ARRAYS]
    bias = "head.4.bias"
    assert moved[bias].numpy() == pytest.approx(plain[bias].numpy() - 1e-3, abs=1e-6)
