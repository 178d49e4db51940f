"""Tests of the method 'feddbe': the pull of the mean, and the mean that leaves once."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.core.errors import SiteError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.methods.feddbe import (
    MEAN,
    BiasedNetwork,
    FedDBESettings,
    MeanPull,
    why_mean_stays,
)
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.feddbe import FedDBE
from tests.reference.small_world import build
from tests.support.asking import arrays_sent, make_reply, state_after
from tests.support.lab import answer
from tests.support.methods import Opened, arrays_of

SGD = {"optimiser": "sgd", "learning_rate": 0.05, "dropout": 0.0}


def test_the_pull_is_of_the_running_mean_without_the_bias() -> None:
    network = BiasedNetwork(build((1, 2, 3), 3))
    inputs, labels = torch.ones(2, 1, 2, 3), torch.tensor([0, 1])
    tokens = network.network.encode(inputs)[0].detach()
    free = network.network.loss(inputs, labels).detach()
    pulled = MeanPull(network, tokens - 2, FedDBESettings(3.0, 1.0))
    # The batch's mean is its tokens, each 2 from the goal: 3 times half of 2^2
    assert float(pulled.loss(inputs, labels).detach() - free) == pytest.approx(6.0, rel=1e-5)
    half = MeanPull(network, torch.zeros_like(tokens), FedDBESettings(2.0, 0.5))
    steps = [float(half.loss(inputs, labels).detach() - free) for _ in range(2)]
    size = float(tokens.square().mean())
    # Running means of 1/2 and 3/4 of the tokens
    assert steps == pytest.approx([size / 4, size * 9 / 16], rel=1e-4)


def test_a_site_sends_its_mean_once_and_then_the_one_that_it_got(
    opened: Opened, weights: dict[str, Any]
) -> None:
    site = opened("feddbe", weights | {MEAN: np.zeros((4, 16), np.float32)}, own=SGD)
    first = arrays_of(answer(site))
    assert first[MEAN].any()
    told = np.full((4, 16), 0.5, np.float32)
    second = opened("feddbe", weights | {MEAN: told}, own=SGD, round=2)
    assert not second.state()["bias"].any(), "round 1 trains no bias"
    np.testing.assert_array_equal(arrays_of(answer(second))[MEAN], told)
    third = opened("feddbe", weights | {MEAN: told}, own=SGD, round=3)
    assert third.state()["bias"].any()


def test_the_mean_of_all_is_made_once(participants: Participants) -> None:
    server = FedDBE(
        CommonSettings(method="feddbe", network="conv", width=4), FedDBESettings(), participants
    )
    state = server.initial_state()
    assert not state.arrays[MEAN].any()
    assert MEAN not in server.model(state)
    for value in (2.0, 5.0):
        replies = {}
        for site, sent in arrays_sent(server, state).items():
            arrays = {name: np.full_like(array, value) for name, array in sent.items()}
            replies[site] = make_reply(site, arrays)
        state = state_after(server, state, replies)
    assert (state.arrays[MEAN] == 2).all()
    assert (server.model(state)["head.4.bias"] == 5).all()


def test_a_mean_over_few_samples_stays(opened: Opened, weights: dict[str, Any]) -> None:
    assert why_mean_stays(10, 10) is None
    assert why_mean_stays(9, 10)
    site = opened("feddbe", weights | {MEAN: np.zeros((4, 16), np.float32)})
    strict = replace(site.session, settings=replace(site.common, sums_min_count=999))
    with pytest.raises(SiteError):
        strict.method.admit(strict)
