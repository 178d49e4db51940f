"""Exact rows out of ordinary training, by weights, steps and batches of the server's choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.support.hospital import Arrays, Hospital, seeded

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
    assert "'batch-size' is 2, and 8 samples at least" in site.refusals[0]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_plane_that_only_one_patient_is_behind_gives_no_row(
    hospital: Make, plan: dict[str, Any]
) -> None:
    """Steep planes: only who is on the wrong side has a gradient, and it is that patient's row."""
    site = hospital(**plan, learning_rate=RATE, dropout=0.0)
    draws, changes = seeded(1), []
    for round_ in range(1, 21):
        direction = draws.normal(size=FEATURES)
        direction /= np.linalg.norm(direction)
        away = draws.choice([-1.0, 1.0]) * draws.uniform(2.0, 4.0)
        change = site.train(logistic(STEEP * away, STEEP * direction), round=round_)
        changes += [change] if change else []
    assert site.recovered(read(changes)) == 0


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_planes_that_differ_in_one_patient_give_no_row(
    hospital: Make, plan: dict[str, Any]
) -> None:
    """One direction, a bias that moves on: two sums over many patients differ in one of them."""
    site = hospital(**plan, learning_rate=RATE, dropout=0.0)
    direction = np.zeros(FEATURES)
    direction[0] = STEEP
    changes = []
    for round_, bias in enumerate(np.linspace(-1.5 * STEEP, 1.5 * STEEP, 30), start=1):
        change = site.train(logistic(float(bias), direction), round=round_)
        changes += [change] if change else []
    assert site.recovered(read(changes)) == 0


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_bins_of_a_hidden_layer_give_no_row(hospital: Make, plan: dict[str, Any]) -> None:
    """Robbing the fed: neighbouring hidden units differ in the patients between their biases."""
    width = 400
    site = hospital(**plan, network="mlp", width=width, dropout=0.0, learning_rate=RATE)
    direction = np.zeros(FEATURES)
    direction[0] = 1.0
    weights = {
        "encoder.layers.0.weight": np.tile(direction, (width, 1)),
        "encoder.layers.0.bias": np.linspace(-3.0, 3.0, width),
        "head.1.weight": np.stack([np.zeros(width), np.full(width, 1e-3)]),
        "head.1.bias": np.array([0.0, 5.0]),
    }
    changes = [site.train(weights, round=round_) for round_ in range(1, 6)]
    answered = [change for change in changes if change]
    mean = [{k: np.mean([c[k] for c in answered], axis=0) for k in weights}] if answered else []
    assert site.recovered(read([*answered, *mean])) == 0


def test_the_same_weights_are_answered_a_few_times_only(hospital: Make) -> None:
    """What the blur hides in one answer a mean over many would show."""
    site = hospital(learning_rate=RATE)
    changes = [site.train(logistic(0.5), round=1) for _ in range(10)]
    assert sum(change is not None for change in changes) == 3
    assert "3 times ('max-repeats')" in site.refusals[0]


def test_who_is_behind_a_step_no_server_can_tell(hospital: Make) -> None:
    """With the run's seed it would know; the hospital's own is drawn once and is its secret."""
    node = {"blur": 0.0, "minimum-batch": 1}
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
