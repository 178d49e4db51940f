"""Tests of the method 'feddyn': site and server."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedsilo.client_app.lab import Lab
from fedsilo.core.messages import ARRAYS, ROUND_KEYS
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.methods.feddyn import FedDynSettings
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.drift_correction import FedDyn
from fedsilo.strategies.wire.reply import Reply
from tests.strategies.conftest import sized
from tests.support.asking import arrays_sent, state_after
from tests.support.lab import answer, steps_of

# At a site

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


# At the server

MEAN = "norm.running_mean"


def test_two_rounds_go_by_the_equations_and_h_is_never_sent(
    participants: Participants, site_reply: Callable[..., Reply]
) -> None:
    known = sized(participants, {"s1a": {"train": 1}, "s2a": {"train": 3}, "s3a": {"train": 4}})
    server = FedDyn(CommonSettings(silos=3), FedDynSettings(0.5), known)

    def after(state: State, one: float, three: float) -> State:
        replies = {
            site: site_reply(
                site, {"w": np.float32([w]), MEAN: np.float32([w])}, num_examples=count
            )
            for site, w, count in (("s1a", one, 1), ("s2a", three, 3))
        }
        return state_after(server, state, replies)

    first = after(State({"w": np.float32([1]), MEAN: np.float32([0])}), 2.0, 6.0)
    # the mean is 5; h = -0.5 * 1/2 * (5 - 1) = -1, as half of the samples answered; 5 + 1 / 0.5
    assert {n: a.tolist() for n, a in first.arrays.items()} == {
        "w": [7.0],
        "h/w": [-1.0],
        MEAN: [5.0],
    }
    second = after(first, 4.0, 8.0)
    # the mean is 7, as the model was: h stays, 7 + 1 / 0.5
    assert second.arrays["h/w"].tolist() == [-1.0]
    assert second.arrays["w"].tolist() == [9.0]
    assert set(arrays_sent(server, second)["s1a"]) == {"w", MEAN}
    assert set(server.model(second)) == {"w", MEAN}
