"""Tests of the method 'fedswa': server."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.methods.fedswa import FedSWASettings
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavgm import FedSWA
from fedsilo.strategies.wire.reply import Reply
from tests.support.asking import arrays_sent, evaluation_of, state_after
from tests.support.errors import refuses

# At the server


def test_the_model_is_the_mean_of_the_last_rounds_and_training_goes_on_from_the_last(
    participants: Participants, site_reply: Callable[..., Reply]
) -> None:
    server = FedSWA(CommonSettings(silos=3, rounds=4), FedSWASettings(2), participants)
    state = State({"w": np.float32([0])})
    for number, value in enumerate((1.0, 3.0, 5.0, 9.0), start=1):
        reply = site_reply("s1a", {"w": np.float32([value])}, num_examples=2)
        state = replace(state_after(server, state, {"s1a": reply}), round=number)
        if number < 4:
            assert arrays_sent(server, state)["s1a"]["w"].tolist() == [value]
    assert server.model(state)["w"].tolist() == [7.0]
    assert evaluation_of(server, state).send["s1a"]["w"].tolist() == [7.0]


def test_the_model_of_a_round_before_the_last_is_the_one_that_sites_measure(
    participants: Participants, site_reply: Callable[..., Reply]
) -> None:
    server = FedSWA(CommonSettings(silos=3, rounds=4), FedSWASettings(3), participants)
    state = State({"w": np.float32([0])})
    for number, value in enumerate((1.0, 3.0, 5.0), start=1):
        reply = site_reply("s1a", {"w": np.float32([value])}, num_examples=2)
        state = replace(state_after(server, state, {"s1a": reply}), round=number)
    measured = arrays_sent(server, state)["s1a"]
    assert measured["w"].tolist() == server.model(state)["w"].tolist() == [5.0]


def test_more_averaged_rounds_than_rounds_are_refused() -> None:
    with refuses(SettingError, "5", "rounds"):
        FedSWASettings(5).check(CommonSettings(rounds=4), is_table=False)
