import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import ARRAYS
from fedsilo.models.contract.methods import title_of
from fedsilo.models.contract.own_settings import NoSettings
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.mix import PoolNotes
from fedsilo.strategies.loop.method import State
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.mix import Mix
from fedsilo.strategies.wire.reply import ArraySpec
from tests.support.asking import (
    arrays_expected,
    arrays_sent,
    evaluation_of,
    question_of,
    state_after,
)

ALL = ["s1a", "s2a", "s3a"]
STATE = State({"w": np.float32([4])}, 1)


@pytest.fixture
def mix(participants: Participants) -> Mix:
    return Mix(CommonSettings(silos=3, width=1), NoSettings(), participants)


def test_only_the_first_site_is_expected_to_answer_with_weights(mix: Mix) -> None:
    found = {site: arrays_expected(mix, STATE)[site] for site in ALL}
    assert found == {"s1a": {"w": ArraySpec((1,))}, "s2a": {}, "s3a": {}}


def test_all_sites_get_the_weights_to_measure_them(mix: Mix) -> None:
    assert all(arrays_sent(mix, STATE)[site] == STATE.arrays for site in ALL)


def test_the_sites_to_pool_are_named_a_line_each(mix: Mix) -> None:
    assert question_of(mix, STATE).notes["s1a"] == PoolNotes(("s1a", "s2a", "s3a"))
    assert evaluation_of(mix, STATE).notes == {}


def test_the_trainers_weights_are_taken_as_they_are(
    mix: Mix, site_reply: Callable[..., Any]
) -> None:
    replies = {"s1a": site_reply("s1a", {"w": [7.0]}), "s2a": site_reply("s2a")}
    after = state_after(mix, STATE, replies)
    assert after.arrays["w"].tolist() == [7]


def test_a_round_without_the_trainer_changes_nothing(
    mix: Mix, site_reply: Callable[..., Any]
) -> None:
    assert state_after(mix, STATE, {"s2a": site_reply("s2a")}) == STATE


@pytest.mark.parametrize("real", [["s2a"], ["s1a", "s3a"]])
def test_an_oracle_over_real_sites_is_refused(participants: Participants, real: list[str]) -> None:
    facts = {
        site: dataclasses.replace(found, simulated=site not in real)
        for site, found in participants.facts.items()
    }
    strategy = Mix(CommonSettings(silos=3), NoSettings(), Participants(facts, participants.nodes))
    with pytest.raises(SettingError, match=rf"{', '.join(real)} are not simulated sites"):
        strategy.initial_state()


def test_in_a_run_one_site_trains_and_all_measure(
    spied_run: Callable[..., Any], tiny: Callable[..., dict[str, Any]], told: Any
) -> None:
    grid, strategy = spied_run(tiny("mix", rounds=2))
    sent, replies = grid.sent[3:], grid.replies[3:]
    assert [told(m)["returns"] for m in sent] == [True, False, False] * 2 + [False] * 3
    assert [ARRAYS in r.content.array_records for r in replies[:6]] == [True, False, False] * 2
    assert all("incoming.test.accuracy" in r.content["metrics"] for r in replies)
    for name, array in strategy.state.arrays.items():
        np.testing.assert_array_equal(array, replies[3].content[ARRAYS][name].numpy())


def test_the_oracle_says_that_it_is_none_of_the_federated_methods(mix: Mix) -> None:
    (told,) = mix.disclosures().leaves
    assert "everything" in told
    assert "simulation only" in told
    assert "oracle" in title_of("mix")
