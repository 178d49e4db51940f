from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.training.optimisers import moments_of, restore_moments
from fedsilo.client_app.training.paced_epochs import open_pacing, shuffle_epoch
from fedsilo.core.messages import ARRAYS
from fedsilo.core.settings.common_settings import CommonSettings
from tests.support.lab import answer

Opened = Callable[..., Lab]
SETTINGS = CommonSettings(epoch_steps=6, pace=2)
# 36 training digits: batches of 9, two rounds an epoch
PACED = {"epoch_steps": 4, "pace": 2, "local_epochs": 2, "batch_size": 32}


def _counting(count: int) -> Callable[[int], Tensor]:
    return lambda epoch: torch.arange(count).roll(epoch)


def test_an_epochs_rounds_go_through_its_order_in_turn() -> None:
    stored: dict[str, Tensor] = {}
    seen = []
    for round_ in (1, 2, 3, 4):
        pacing = open_pacing(stored, round_, 13, SETTINGS, _counting(13))
        seen.append([batch.tolist() for batch in pacing.batches()])
        stored = pacing.next_state()
    assert seen[:3] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert seen[3] == [[12, 0], [1, 2]]  # the next epoch's order begins with another


def test_a_small_site_begins_again_within_its_epoch() -> None:
    stored: dict[str, Tensor] = {}
    seen = []
    for round_ in (1, 2):
        pacing = open_pacing(stored, round_, 3, SETTINGS, _counting(3))
        seen += [batch.tolist() for batch in pacing.batches()]
        stored = pacing.next_state()
    assert seen == [[0, 1], [2, 0], [1, 2], [0, 1]]


def test_a_site_that_missed_a_round_goes_on_where_it_was_until_the_epoch_ends() -> None:
    first = open_pacing({}, 1, 13, SETTINGS, _counting(13))
    stored = first.next_state()
    third = open_pacing(stored, 3, 13, SETTINGS, _counting(13))
    assert third.batches()[0].tolist() == [4, 5]
    fourth = open_pacing(stored, 4, 13, SETTINGS, _counting(13))
    assert (fourth.epoch, fourth.position) == (1, 0)
    late = open_pacing({}, 2, 13, SETTINGS, _counting(13))  # it came in the middle of an epoch
    assert (late.epoch, late.position) == (0, 0)


def test_adam_that_is_put_back_takes_the_step_that_it_would_have_taken() -> None:
    torch.manual_seed(0)
    whole, parted = nn.Linear(3, 2), nn.Linear(3, 2)
    parted.load_state_dict(whole.state_dict())
    inputs = torch.randn(2, 5, 3)

    def step(module: nn.Module, optimiser: torch.optim.Optimizer, batch: Tensor) -> None:
        optimiser.zero_grad()
        module(batch).square().sum().backward()
        optimiser.step()

    one = torch.optim.Adam(whole.parameters(), lr=0.1)
    two = torch.optim.Adam(parted.parameters(), lr=0.1)
    step(whole, one, inputs[0])
    step(parted, two, inputs[0])
    again = torch.optim.Adam(parted.parameters(), lr=0.1)
    restore_moments(again, parted, moments_of(two, parted))
    step(whole, one, inputs[1])
    step(parted, again, inputs[1])
    assert torch.equal(whole.weight, parted.weight)


def _rounds(opened: Opened, weights: dict[str, Any], pace: int, count: int) -> dict[str, Any]:
    """Train ``count`` rounds from ``weights``, each going on from the round before."""
    arrays = weights
    for round_ in range(1, count + 1):
        own = PACED | {"pace": pace, "dropout": 0.0}
        site = opened("fedavg", arrays, own=own, round=round_, evaluate=False, run_dir="x")
        reply = answer(site)
        arrays = {name: array.numpy() for name, array in reply[ARRAYS].items()}
    return arrays


def test_two_rounds_of_half_an_epoch_are_one_of_a_whole(
    opened: Opened, weights: dict[str, Any], tmp_path: Any
) -> None:
    whole = _rounds(opened, weights, 4, 1)
    for path in (tmp_path / "sites").rglob("*"):
        if path.is_file():
            path.unlink()
    halves = _rounds(opened, weights, 2, 2)
    assert all((whole[name] == halves[name]).all() for name in whole)


def test_the_loss_told_is_of_the_rounds_steps(opened: Opened, weights: dict[str, Any]) -> None:
    site = opened("fedavg", weights, own=PACED, evaluate=False)
    loss = answer(site)["metrics"]["trained.train.loss"]
    assert 1.5 < cast(float, loss) < 4
    assert site.stored_state == {}
    after = opened("fedavg", weights, own=PACED, round=2)
    assert int(after.stored_state["pace/position"]) == 2
    assert after.state() == {}


def test_an_order_of_another_epoch_is_another_one(opened: Opened, weights: dict[str, Any]) -> None:
    common = opened("fedavg", weights, own=PACED).common
    first, second = (shuffle_epoch(36, common, epoch, "s1a") for epoch in (0, 1))
    assert sorted(first.tolist()) == list(range(36)) == sorted(second.tolist())
    assert first.tolist() != second.tolist()
    assert pytest.approx(first.tolist()) == shuffle_epoch(36, common, 0, "s1a").tolist()
