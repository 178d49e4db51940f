"""Tests of the method 'fedavg-ft': site and server."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.core.errors import CheckpointError, SettingError, SiteError
from fedsilo.core.messages import ARRAYS, EVALUATE, METRICS, TRAIN, Instruction
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.methods.fedavg_ft import FedAvgFTSettings
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.personal_models import FedAvgFT, PersonalState
from fedsilo.strategies.wire.reply import ArraySpec, Reply
from tests.support.asking import arrays_expected, arrays_sent, state_after
from tests.support.errors import refuses
from tests.support.lab import answer, evaluate, steps_of
from tests.support.methods import ALL, Opened, weights_of

# At a site

RATES = {"learning_rate": 0.5, "finetune_learning_rate": 0.25}


def test_before_fine_tuning_a_round_is_fedavgs(opened: Opened, weights: dict[str, Any]) -> None:
    method = opened("fedavg-ft", weights, own={"finetune_learning_rate": 0.25})
    found, fedavg = answer(method), answer(opened("fedavg", weights))
    assert set(found[ARRAYS]) == set(weights)
    for name, array in fedavg[ARRAYS].items():
        np.testing.assert_array_equal(found[ARRAYS][name].numpy(), array.numpy())
    assert found[METRICS]["kept-state"] == 0
    assert not method.state_files.folder.exists()


@pytest.mark.parametrize(
    ("fields", "rate"),
    [({"returns": True}, 0.5), ({"returns": False}, 0.25)],
)
def test_fine_tuning_has_a_step_size_of_its_own(
    opened: Opened, weights: dict[str, Any], fields: dict[str, Any], rate: float
) -> None:
    site = opened("fedavg-ft", weights, own=RATES, **fields)
    settings = steps_of(site).fit.get("settings", site.sampling)
    assert settings.learning_rate == rate
    assert settings.batch_size == 16


def test_the_step_size_of_fine_tuning_is_the_one_that_trains(
    opened: Opened, weights: dict[str, Any]
) -> None:
    moved = {}
    for rate in (1e-6, 1e-2):
        method = opened("fedavg-ft", weights, own={"finetune_learning_rate": rate}, returns=False)
        answer(method)
        kept = method.state_files.load_before(Instruction(2, "train"))
        assert kept is not None
        moved[rate] = np.abs(kept["head.4.weight"].numpy() - weights["head.4.weight"]).max()
    assert 0 < moved[1e-6] < 1e-4 < moved[1e-2]


def test_fine_tuning_starts_from_the_global_weights_and_sends_none(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("fedavg-ft", weights, returns=False)
    for name, tensor in weights_of(method).items():
        np.testing.assert_array_equal(tensor, weights[name])
    reply = answer(method)
    assert ARRAYS not in reply
    assert reply[METRICS]["kept-state"] == 1


def test_fine_tuning_goes_on_from_the_sites_own_weights(
    opened: Opened, weights: dict[str, Any]
) -> None:
    first = opened("fedavg-ft", weights, returns=False)
    answer(first)
    kept = first.state_files.load_before(Instruction(2, "train"))
    assert kept is not None
    assert set(kept) == set(weights)
    second = opened("fedavg-ft", round=2, returns=False)
    for name, tensor in weights_of(second).items():
        assert torch.equal(tensor, kept[name])
    answer(second)
    later = second.state_files.load_before(Instruction(3, "train"))
    assert later is not None
    assert not torch.equal(later["head.4.bias"], kept["head.4.bias"])


def test_the_final_evaluation_measures_the_personal_model_and_stores_nothing(
    opened: Opened, weights: dict[str, Any]
) -> None:
    trained = opened("fedavg-ft", weights, returns=False)
    expected = answer(trained)[METRICS]["trained.val.loss"]
    before = sorted(path.name for path in trained.state_files.folder.iterdir())
    method = opened("fedavg-ft", round=2, phase="evaluate", returns=False)
    found = evaluate(method)[METRICS]
    # the same weights, other dropout draws
    assert found["incoming.val.loss"] == pytest.approx(expected, rel=0.05)
    assert found["kept-state"] == 0
    assert sorted(path.name for path in method.state_files.folder.iterdir()) == before


@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_a_site_with_neither_own_nor_global_weights_is_told_so(opened: Opened, phase: str) -> None:
    method = opened("fedavg-ft", round=2, phase=phase, returns=False)
    with pytest.raises(SiteError, match="site s1a has no own model, but the message has none"):
        method.open()


def test_a_personal_model_that_is_gone_is_an_error(opened: Opened) -> None:
    with pytest.raises(CheckpointError, match="site s1a is gone from"):
        answer(opened("fedavg-ft", round=2, returns=False, expects_state=True))


# At the server

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
    with refuses(SettingError, "fedavg-ft.finetune-rounds", 5, "rounds", rounds):
        own.check(CommonSettings(rounds=rounds), is_table=False)
    own.check(CommonSettings(rounds=6), is_table=False)


def test_it_says_in_how_many_rounds_weights_leave(finetuning: Build) -> None:
    (told,) = finetuning().disclosures().leaves
    assert "each of the first 3 rounds; the fine-tuned model stays" in told
