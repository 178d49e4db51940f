"""Tests of the method 'fednova': site and server."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsilo.client_app.lab import Lab
from fedsilo.core.array_names import is_statistic
from fedsilo.core.messages import ARRAYS, METRICS
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.drift_correction import FedNova
from tests.support.asking import fault_of, question_of, state_after
from tests.support.lab import answer
from tests.support.methods import SiteReply

# At a site


def test_an_update_is_divided_by_the_steps_and_statistics_are_not(
    opened: Callable[..., Lab], weights: dict[str, Any]
) -> None:
    found = answer(opened("fednova", weights))
    fedavg = answer(opened("fedavg", weights))[ARRAYS]
    assert found[METRICS]["steps"] == 3  # 36 samples in batches of 16, the last of 4
    for name, array in fedavg.items():
        whole = array.numpy()
        part = whole if is_statistic(name) else weights[name] + (whole - weights[name]) / 3
        np.testing.assert_allclose(found[ARRAYS][name].numpy(), part, atol=1e-6)


# At the server

START = State({"w": np.float32([1])})


def method(participants: Participants, **common: Any) -> FedNova:
    return FedNova(CommonSettings(silos=3, **common), NoSettings(), participants)


def test_the_model_goes_the_mean_number_of_steps_in_the_mean_direction_of_a_step(
    participants: Participants, site_reply: SiteReply
) -> None:
    replies = {
        site: site_reply(site, {"w": np.float32([w])}, num_examples=count, steps=steps)
        for site, w, count, steps in (("s1a", 2.0, 1, 2), ("s2a", 4.0, 3, 6))
    }
    # a step leads to (2 + 3 * 4) / 4 = 3.5, 2.5 away; (2 + 3 * 6) / 4 = 5 steps
    assert state_after(method(participants), START, replies).arrays["w"].tolist() == [13.5]


@pytest.mark.parametrize(
    ("steps", "common", "most"),
    [
        (0, {}, 5),
        (6, {"local_epochs": 1, "batch_size": 8}, 5),
        (8, {"local_steps": 7}, 7),
    ],
)
def test_steps_that_no_such_site_can_take_are_a_fault(
    steps: int,
    common: dict[str, int],
    most: int,
    participants: Participants,
    site_reply: SiteReply,
) -> None:
    server = method(participants, **({"local_epochs": 1, "batch_size": 8} | common))
    reply = site_reply("s1a", {"w": np.float32([1])}, num_examples=36, steps=steps)
    assert fault_of(server, START, reply) == f"metric 'steps' is {steps}, not 1 to {most}"


def test_a_reply_without_steps_is_of_no_use(participants: Participants) -> None:
    assert question_of(method(participants), START).metrics == ["steps"]


def test_what_leaves_names_the_steps(participants: Participants) -> None:
    assert "optimiser steps" in method(participants).disclosures().leaves[-1]
