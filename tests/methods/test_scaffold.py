"""Tests of the method 'scaffold': site and server."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.core.array_names import arrays_below, with_prefix
from fedsilo.core.messages import ARRAYS, ROUND_KEYS
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.methods.scaffold import SCAFFOLDSettings
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.checks import AgreedWeights, Terms
from fedsilo.strategies.meeting.participants import Participants
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


# At the server

START = State({"w": np.float32([1]), "control/w": np.float32([2])})


def method(participants: Participants, rate: float = 1.0, **common: Any) -> SCAFFOLD:
    known = sized(participants, {"s1a": {"train": 1}, "s2a": {"train": 3}, "s3a": {"train": 4}})
    return SCAFFOLD(CommonSettings(silos=3, **common), SCAFFOLDSettings(rate), known)


def answers(site_reply: SiteReply) -> dict[str, Reply]:
    """Return what two of three sites answer, with 1 and 3 of all 8 samples."""
    return {
        site: site_reply(
            site, {"w": np.float32([w]), "control/w": np.float32([c])}, num_examples=count
        )
        for site, w, c, count in (("s1a", 2.0, 0.0, 1), ("s2a", 6.0, 4.0, 3))
    }


def test_weights_are_averaged_and_controls_move_by_the_share_that_answered(
    participants: Participants, site_reply: SiteReply
) -> None:
    after = state_after(method(participants, 0.5), START, answers(site_reply))
    # the mean is (2 + 3 * 6) / 4 = 5, half the way from 1 is 3; of the controls it is 3, and half
    # of the samples answered: 2 + (3 - 2) / 2
    assert {n: a.tolist() for n, a in after.arrays.items()} == {"w": [3.0], "control/w": [2.5]}


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
    weights, gradient = method(participants).disclosures().leaves
    assert "all weights" in weights
    assert "mean gradient" in gradient


def test_a_secret_sum_gives_the_weights_and_controls_of_an_open_one(
    spied_run: Callable[..., Any], tiny: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    sgd = {"optimiser": "sgd", "learning_rate": 0.01}  # Adam would make much of the rounding
    opened = spied_run(tiny("scaffold", **sgd))[1].state.arrays
    secret = tiny("scaffold", clip_norm=5.0, secure_aggregation="secagg", **sgd)
    shutil.rmtree(tmp_path / "sites")  # kept under other settings
    summed = spied_run(secret)[1].state.arrays
    assert any(name.startswith("control/") and array.any() for name, array in summed.items())
    # These tiny sites weigh little of the 16,384 samples by which a sum is scaled, so a mean is
    # rounded to about 4e-6; a control variate is that over 0.01 times the steps
    for name, array in opened.items():
        np.testing.assert_allclose(summed[name], array, atol=1e-3)
