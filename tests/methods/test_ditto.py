"""Tests of the method 'ditto': site."""

from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.core.messages import ARRAYS, METRICS
from tests.support.lab import answer
from tests.support.methods import Opened

# At a site

BIAS = "head.4.bias"
SGD = {"optimiser": "sgd", "learning_rate": 0.05, "dropout": 0.0}


def trained(opened: Opened, arrays: dict[str, Any], **fields: Any) -> dict[str, Any]:
    sent = answer(opened("ditto", arrays, **fields))[ARRAYS]
    return {name: array.numpy() for name, array in sent.items()}


def test_what_leaves_is_the_global_model_and_the_own_one_stays(
    opened: Opened, weights: dict[str, Any]
) -> None:
    sent = trained(opened, weights, own=SGD)
    second = opened("ditto", sent, own=SGD, round=2)
    own = second.state()
    assert own.keys() == sent.keys() == weights.keys()
    assert (own[BIAS].numpy() != sent[BIAS]).any(), "their batches are in another order"
    assert torch.equal(second.open().state_dict()[BIAS], own[BIAS])


def test_the_global_part_does_not_depend_on_the_own_one(
    opened: Opened, weights: dict[str, Any]
) -> None:
    trained(opened, weights, own=SGD)
    after = trained(opened, weights, own=SGD, round=2)
    fresh = trained(opened, weights, own=SGD, round=2, site="s1a")
    for name in weights:
        np.testing.assert_array_equal(after[name], fresh[name])


def test_a_large_lambda_keeps_the_own_model_near_what_came(
    opened: Opened, weights: dict[str, Any]
) -> None:
    def gone(value: float) -> float:
        own = SGD | {"learning_rate": 0.01, "local_steps": 12, "personal_lambda": value}
        trained(opened, weights, own=own)
        kept = opened("ditto", weights, own=own, round=2).state()
        return float(np.abs(kept[BIAS].numpy() - weights[BIAS]).sum())

    # a step of SGD takes back rate * lambda = 0.9 of the way that is gone
    assert gone(90.0) < 0.6 * gone(1e-6)


def test_the_loss_that_is_reported_is_the_own_models(
    opened: Opened, weights: dict[str, Any]
) -> None:
    metrics = answer(opened("ditto", weights, own=SGD))[METRICS]
    assert metrics["trained.train.loss"] > 0


@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_a_site_without_a_model_of_its_own_opens_what_came(
    phase: str, opened: Opened, weights: dict[str, Any]
) -> None:
    network = opened("ditto", weights, phase=phase).open()
    np.testing.assert_array_equal(network.state_dict()[BIAS], weights[BIAS])
