from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedsilo.client_app.lab import Lab
from fedsilo.models.contract.messages import ARRAYS, ROUND_KEYS
from tests.support.lab import answer, steps_of

OWN = {"optimiser": "sgd", "learning_rate": 0.01, "regularisation_alpha": 0.5}
BIAS = "head.4.bias"


def test_the_local_gradient_that_stays_is_minus_alpha_times_the_way_gone(
    opened: Callable[..., Lab], weights: dict[str, Any]
) -> None:
    sent = answer(opened("feddyn", weights, own=OWN))[ARRAYS]
    kept = opened("feddyn", weights, own=OWN, round=2).state()
    moved = sent[BIAS].numpy() - weights[BIAS]
    np.testing.assert_allclose(kept[BIAS].numpy(), -0.5 * moved, atol=1e-7)
    assert not any("running" in name for name in kept)


def test_the_penalty_has_the_local_gradient_as_a_slope_and_the_pull(
    opened: Callable[..., Lab], weights: dict[str, Any]
) -> None:
    answer(opened("feddyn", weights, own=OWN))
    lab = opened("feddyn", weights, own=OWN, round=2, expects_state=ROUND_KEYS)
    gradient = lab.state()[BIAS]
    steps = steps_of(lab)
    bias = dict(steps.network.named_parameters())[BIAS]
    with torch.no_grad():
        before = steps.fit["penalty"]().item()
        bias += 2.0
        after = steps.fit["penalty"]().item()
    # -2 * the sum of the slopes, and 0.5 / 2 * 2^2 for each of ten
    np.testing.assert_allclose(after - before, -2 * gradient.sum().item() + 10, rtol=1e-4)
