"""Exact rows out of ordinary training, by weights, steps and batches of the server's choice."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.support.hospital import Arrays, Hospital

Make = Callable[..., Hospital]
Vector = np.ndarray[Any, Any]

FEATURES = 13
RATE, STEEP = 0.1, 30.0  # a change of one patient's row is well above the weights' last bits
# What a run may ask of a hospital's optimiser; the last two are such that the defaults refuse them
PLANS = (
    {"optimiser": "sgd", "batch_size": 8, "local_steps": 2},
    {"optimiser": "sgd", "batch_size": 256, "local_epochs": 2},
    {"optimiser": "adam", "batch_size": 8, "local_steps": 2},
    {"optimiser": "adamw", "batch_size": 32, "local_epochs": 1},
    {"optimiser": "sgd", "batch_size": 256, "local_epochs": 1},
    {"optimiser": "sgd", "batch_size": 2, "local_steps": 1},
)


def logistic(bias: float, weight: Vector | float = 0.0) -> dict[str, Any]:
    """Return a logistic model of two classes that gives the second one ``weight`` x + ``bias``."""
    row = np.broadcast_to(weight, (FEATURES,))
    return {
        "head.1.weight": np.stack([np.zeros(FEATURES), row]),
        "head.1.bias": np.array([0.0, bias]),
    }


def read(changes: list[Arrays]) -> Iterator[Vector]:
    """Yield what a linear layer's changes tell: weights over bias, alone and by differences."""
    pairs = [
        (change[f"{layer}.weight"], change[f"{layer}.bias"])
        for change in changes
        for layer in ("head.1", "encoder.layers.0")
        if f"{layer}.weight" in change and change[f"{layer}.weight"].shape[1] == FEATURES
    ]
    with np.errstate(all="ignore"):
        for weight, bias in pairs:
            yield from weight / bias[:, None]
            yield from np.diff(weight, axis=0) / np.diff(bias)[:, None]
        for (weight, bias), (other, other_bias) in pairwise(pairs):
            yield from (weight - other) / (bias - other_bias)[:, None]


def test_two_biases_of_the_same_pair_give_both_rows(hospital: Make) -> None:
    """A step of two samples is p(x1 + x2) - x_positive: two values of p solve it."""
    plan = {"optimiser": "sgd", "batch_size": 2, "local_steps": 1}
    site = hospital(**plan, learning_rate=1.0, dropout=0.0)
    found: list[Vector] = []
    chances = [1 / (1 + np.exp(-bias)) for bias in (-1.0, 1.0)]
    for round_ in range(1, 41):
        asked = [site.train(logistic(bias), round=round_) for bias in (-1.0, 1.0)]
        if asked[0] is None or asked[1] is None:
            continue
        low, high = (-2 * change["head.1.weight"][1] for change in asked if change)
        both = (high - low) / (chances[1] - chances[0])
        positive = chances[1] * both - high
        found += [positive, both - positive]
    assert site.recovered(found) == 0
    assert "'train.batch-size' is 2, but this hospital requires at least 8" in site.refusals[0]


def test_the_same_weights_are_answered_a_few_times_only(hospital: Make) -> None:
    site = hospital(learning_rate=RATE)
    changes = [site.train(logistic(0.5), round=1) for _ in range(10)]
    assert sum(change is not None for change in changes) == 3
    assert "3 times ('max-repeats')" in site.refusals[0]


def test_who_is_behind_a_step_no_server_can_tell(hospital: Make) -> None:
    """With the run's seed it would know; the hospital's own is drawn once and is its secret."""
    node = {"minimum-batch": 1}
    site = hospital(node=node, optimiser="sgd", batch_size=8, local_steps=2, learning_rate=RATE)
    first, again = (site.train(logistic(0.5), round=1) for _ in range(2))
    assert first is not None
    assert again is not None
    np.testing.assert_array_equal(first["head.1.weight"], again["head.1.weight"])
    (site.home / ".own" / "cleveland" / "seed").unlink()
    other = site.train(logistic(0.5), round=1)
    assert other is not None
    assert (other["head.1.weight"] != first["head.1.weight"]).any()


@pytest.mark.parametrize("changes", [{"epoch_steps": 40, "pace": 2}, {"micro_batch": 2}], ids=str)
def test_no_other_key_makes_a_step_of_few(hospital: Make, changes: dict[str, Any]) -> None:
    site = hospital(**changes)
    assert site.train(logistic(0.5)) is None
    assert "'minimum-batch'" in site.refusals[0]
