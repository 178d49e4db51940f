"""Tests of the method 'fedbabu': site."""

from typing import Any

import numpy as np

from fedsilo.core.messages import ARRAYS
from tests.support.lab import answer
from tests.support.methods import Opened

# At a site

SGD = {"optimiser": "sgd", "learning_rate": 0.05, "weight_decay": 0.1}
HEAD = ["head.4.bias", "head.4.weight"]


def test_the_body_is_trained_and_sent_while_there_is_averaging_and_the_head_is_not(
    opened: Opened, weights: dict[str, Any]
) -> None:
    lab = opened("fedbabu", weights, own=SGD)
    sent = {n: a.numpy() for n, a in answer(lab)[ARRAYS].items()}
    assert weights.keys() - sent.keys() == set(HEAD)
    assert (sent["head.1.bias"] != weights["head.1.bias"]).any()
    # the head that this body was trained beneath is the one that came
    network = lab.trained
    assert network is not None
    for name in HEAD:
        np.testing.assert_array_equal(network.state_dict()[name], weights[name])


def test_fine_tuning_trains_the_head_too(opened: Opened, weights: dict[str, Any]) -> None:
    answer(opened("fedbabu", weights, own=SGD, returns=False))
    kept = opened("fedbabu", None, own=SGD, round=2, returns=False).state()
    assert all((kept[name].numpy() != weights[name]).any() for name in HEAD)
