"""Tests of the method 'scaffold': site and server."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.core.array_names import arrays_below, is_statistic, with_prefix
from fedsilo.core.messages import ARRAYS, ROUND_KEYS
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.methods.scaffold import SCAFFOLDSettings
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.meeting.terms import AgreedWeights, Terms
from fedsilo.strategies.methods.drift_correction import SCAFFOLD
from fedsilo.strategies.wire.reply import Reply
from tests.strategies.conftest import sized
from tests.support.asking import question_of, state_after
from tests.support.lab import answer
from tests.support.methods import Opened, SiteReply

# At a site

SGD = {"optimiser": "sgd", "learning_rate": 0.01, "dropout": 0.0}


def controls_of(opened: Opened, weights: dict[str, Any], value: float) -> dict[str, Any]:
    trained = dict(opened("fedavg", weights).open().named_parameters())
    return with_prefix("control/", {n: np.full_like(weights[n], value) for n in trained})


def whole(sent: Any, weights: dict[str, Any], name: str, steps: int) -> Any:
    """Return the array to which a site has trained, from the one with a step's mean update."""
    array = sent[name].numpy()
    if is_statistic(name):
        return array
    return weights[name] + steps * (array - weights[name])


def test_without_controls_the_first_round_is_fedavgs_and_sends_the_mean_gradient(
    opened: Opened, weights: dict[str, Any]
) -> None:
    zeros = controls_of(opened, weights, 0.0)
    found = answer(opened("scaffold", weights | zeros, own=SGD))[ARRAYS]
    fedavg = answer(opened("fedavg", weights, own=SGD))[ARRAYS]
    steps = 3  # 36 samples in batches of 16: eta c_i = (x - y) / K
    for name, array in fedavg.items():
        np.testing.assert_allclose(whole(found, weights, name, steps), array.numpy(), atol=1e-6)
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
        np.testing.assert_allclose(whole(second, weights, name, 3), array.numpy(), atol=1e-5)


def test_a_control_of_eta_c_moves_each_weight_by_it_in_each_step(
    opened: Opened, weights: dict[str, Any]
) -> None:
    lone = {**SGD, "local_steps": 1}
    zeros, ones = (controls_of(opened, weights, value) for value in (0.0, 1e-3))
    plain = answer(opened("scaffold", weights | zeros, own=lone))[ARRAYS]
    moved = answer(opened("scaffold", weights | ones, own=lone, round=1))[ARRAYS]
    bias = "head.4.bias"
    assert moved[bias].numpy() == pytest.approx(plain[bias].numpy() - 1e-3, abs=1e-6)


# At the server

START = State({"w": np.float32([1]), "control/w": np.float32([2])})


def method(participants: Participants, rate: float = 1.0, **common: Any) -> SCAFFOLD:
    known = sized(participants, {"s1a": {"train": 1}, "s2a": {"train": 3}, "s3a": {"train": 4}})
    return SCAFFOLD(CommonSettings(silos=3, **common), SCAFFOLDSettings(rate), known)


def answers(site_reply: SiteReply, steps: tuple[int, int] = (1, 1)) -> dict[str, Reply]:
    """Return what two of three sites answer, with 1 and 3 of all 8 samples."""
    replies = {}
    for site, w, c, count, taken in (
        ("s1a", 2.0, 0.0, 1, steps[0]),
        ("s2a", 6.0, 4.0, 3, steps[1]),
    ):
        arrays = {"w": np.float32([w]), "control/w": np.float32([c])}
        metrics = {"inverse-steps": 1 / taken, "num_examples": count}
        replies[site] = site_reply(site, arrays, **metrics)
    return replies


def test_weights_are_averaged_and_controls_move_by_the_share_that_answered(
    participants: Participants, site_reply: SiteReply
) -> None:
    after = state_after(method(participants, 0.5), START, answers(site_reply))
    # the mean is (2 + 3 * 6) / 4 = 5, half the way from 1 is 3; of the controls it is 3, and half
    # of the samples answered: 2 + (3 - 2) / 2
    assert {n: a.tolist() for n, a in after.arrays.items()} == {"w": [3.0], "control/w": [2.5]}


def test_a_model_counts_by_samples_per_step_and_a_control_by_samples(
    participants: Participants, site_reply: SiteReply
) -> None:
    after = state_after(method(participants), START, answers(site_reply, (1, 3)))
    # each step moved w by 1 and by 5; with samples per step 1 / 1 and 3 / 3 the models 2 and
    # 1 + 3 * 5 = 16 count alike
    assert after.arrays["w"].tolist() == pytest.approx([9.0])
    assert after.arrays["control/w"].tolist() == [2.5]


@pytest.mark.parametrize(
    ("share", "steps", "is_usable"),
    [
        (1.0, 3, True),
        (1 / 3, 3, True),
        (1 / 4, 3, False),
        (0.0, 3, False),
        (1e-320, 3, False),
        (1 / 4, 0, True),  # 49 samples in batches of 16
        (1 / 5, 0, False),
    ],
)
def test_a_reply_of_impossible_steps_is_refused(
    participants: Participants, site_reply: SiteReply, share: float, steps: int, is_usable: bool
) -> None:
    server = method(participants, local_steps=steps, local_epochs=1, batch_size=16)
    reply = replace(site_reply("s1a", {}, **{"inverse-steps": share}), examples=49)
    assert (server.implausible_steps(reply) is None) == is_usable


def test_controls_move_by_the_share_of_the_samples_that_were_agreed(
    participants: Participants, site_reply: SiteReply
) -> None:
    agreed = AgreedWeights("weights.yaml", {"s1a": 1, "s2a": 3, "s3a": 12})
    server = method(participants)
    server.participants = replace(server.participants, terms=Terms(weights=agreed))
    # of 16 agreed samples 4 answered: 2 + (3 - 2) / 4
    assert state_after(server, START, answers(site_reply)).arrays["control/w"].tolist() == [2.25]


def test_a_reply_is_an_update_of_the_weights_alone(participants: Participants) -> None:
    asked = question_of(method(participants), START)
    assert set(asked.send["s1a"]) == set(asked.expect["s1a"]) == {"w", "control/w"}
    assert set(asked.reference["s1a"]) == {"w"}
    assert set(method(participants).model(START)) == {"w"}


def test_long_controls_put_no_site_out_of_the_round(
    spied_run: Callable[..., Any], tiny: Callable[..., dict[str, Any]], recorder: Any
) -> None:
    spied_run(tiny("scaffold", max_update_norm=3.0, learning_rate=1e-4), [recorder])
    assert not recorder.failures


def test_what_leaves_names_weights_and_gradient(participants: Participants) -> None:
    weights, gradient, steps = method(participants).disclosures().leaves
    assert "all weights" in weights
    assert "mean gradient" in gradient
    assert "number of optimiser steps" in steps


@pytest.mark.parametrize("trust", ["server", "sums"])
def test_a_secret_sum_gives_the_weights_and_controls_of_an_open_one(
    spied_run: Callable[..., Any], tiny: Callable[..., dict[str, Any]], tmp_path: Path, trust: str
) -> None:
    sgd = {"optimiser": "sgd", "learning_rate": 0.01}  # Adam would make much of the rounding
    opened = spied_run(tiny("scaffold", **sgd))[1].state.arrays
    secret = tiny("scaffold", clip_norm=5.0, secure_aggregation="secagg", trust=trust, **sgd)
    shutil.rmtree(tmp_path / "sites")  # kept under other settings
    summed = spied_run(secret)[1].state.arrays
    assert any(name.startswith("control/") and array.any() for name, array in summed.items())
    # These tiny sites weigh little of the 16,384 samples by which a sum is scaled, so a mean is
    # rounded to about 4e-6; a control variate is that over 0.01 times the steps
    for name, array in opened.items():
        np.testing.assert_allclose(summed[name], array, atol=1e-3)
