from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import ARRAYS, EVALUATE, TRAIN
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.methods.fedavg_ft import FedAvgFTSettings
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.fedavg_ft import FedAvgFT
from fedsilo.strategies.methods.personal_models import PersonalState
from fedsilo.strategies.wire.reply import ArraySpec, Reply
from tests.support.asking import arrays_expected, arrays_sent, state_after

ALL = ["s1a", "s2a", "s3a"]
Build = Callable[..., FedAvgFT]
Run = Callable[..., tuple[Any, FedAvgFT]]


@pytest.fixture
def finetuning(participants: Participants) -> Build:
    """Return a builder of five rounds, the last two of which fine-tune."""

    def build(**own: Any) -> FedAvgFT:
        settings = FedAvgFTSettings(**{"finetune_rounds": 2, **own})
        return FedAvgFT(CommonSettings(rounds=5, silos=3), settings, participants)

    return build


def state(round_: int, *personal: str) -> PersonalState:
    return PersonalState({"w": np.float32([4])}, round_, personal=personal)


@pytest.mark.parametrize(
    ("round_", "averages"), [(0, True), (1, True), (2, True), (3, False), (4, False)]
)
def test_the_last_rounds_expect_no_weights_and_change_none(
    finetuning: Build, site_reply: Callable[..., Reply], round_: int, averages: bool
) -> None:
    strategy, before = finetuning(), state(round_)
    expected = {"w": ArraySpec((1,))} if averages else {}
    assert arrays_expected(strategy, before)["s1a"] == expected
    replies = {
        "s1a": site_reply("s1a", {"w": [2.0]}, num_examples=1),
        "s2a": site_reply("s2a", {"w": [6.0]}, num_examples=3),
    }
    after = state_after(strategy, before, replies)
    assert after.arrays["w"].tolist() == ([5] if averages else [4])


@pytest.mark.parametrize("phase", [TRAIN, EVALUATE])
def test_global_weights_go_only_to_sites_without_a_personal_model(
    finetuning: Build, phase: str
) -> None:
    strategy, before = finetuning(), state(4, "s2a")
    found = {site: dict(arrays_sent(strategy, before, phase)[site]) for site in ALL}
    assert found == {"s1a": before.arrays, "s2a": {}, "s3a": before.arrays}


def test_in_a_run_the_average_goes_out_once_more_and_then_nothing(
    spied_run: Run, tiny: Callable[..., dict[str, Any]], told: Any, recorder: Any
) -> None:
    grid, strategy = spied_run(tiny("fedavg-ft", rounds=4, finetune_rounds=2), [recorder])
    sent, replies = grid.sent[3:], grid.replies[3:]
    holds = [ARRAYS in message.content.array_records for message in sent]
    assert holds == [True] * 9 + [False] * 6
    assert [ARRAYS in r.content.array_records for r in replies] == [True] * 6 + [False] * 9
    assert [told(m)["returns"] for m in sent] == [True] * 6 + [False] * 9
    average = recorder.states[1].arrays
    for message in sent[6:9]:
        for name, array in message.content[ARRAYS].items():
            np.testing.assert_array_equal(array.numpy(), average[name])
    for name, array in strategy.state.arrays.items():
        np.testing.assert_array_equal(array, average[name])
    assert [recorded.stateful_sites for recorded in recorder.states] == [
        (),
        (),
        tuple(ALL),
        tuple(ALL),
    ]


def test_until_it_fine_tunes_a_run_is_fedavgs(
    spied_run: Run, tiny: Callable[..., dict[str, Any]], recorder: Any
) -> None:
    spied_run(tiny("fedavg-ft", rounds=3, finetune_rounds=1), [recorder])
    _, fedavg = spied_run(tiny("fedavg", rounds=2))
    for name, array in fedavg.state.arrays.items():
        np.testing.assert_array_equal(recorder.states[1].arrays[name], array)


@pytest.mark.parametrize("rounds", [1, 4, 5])
def test_a_run_that_would_only_fine_tune_is_refused(rounds: int) -> None:
    own = FedAvgFTSettings(finetune_rounds=5)
    with pytest.raises(
        SettingError, match=rf"'fedavg-ft.finetune-rounds' is 5 and 'rounds' is {rounds}: no"
    ):
        own.check(CommonSettings(rounds=rounds), is_table=False)
    own.check(CommonSettings(rounds=6), is_table=False)


def test_it_says_in_how_many_rounds_weights_leave(finetuning: Build) -> None:
    (told,) = finetuning().disclosures().leaves
    assert "each of the first 3 rounds; the fine-tuned model stays" in told
