"""Tests of the method 'local': site and server."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedsilo.core.errors import CheckpointError, SiteError
from fedsilo.core.messages import ARRAYS, METRICS, ROUND_KEYS, Instruction
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings.own_settings import NoSettings
from fedsilo.strategies.loop.round_loop import RoundLoop
from fedsilo.strategies.meeting.participants import Participants
from fedsilo.strategies.methods.local import Local
from tests.support.errors import refuses
from tests.support.lab import answer, evaluate
from tests.support.methods import Opened, SharedRun, weights_of

# At a site


def test_the_first_round_starts_from_the_seeds_weights_as_in_every_method(
    opened: Opened, weights: dict[str, Any]
) -> None:
    for site in ("s1a", "s3a"):
        own = weights_of(opened("local", site=site))
        assert set(own) == set(weights)
        for name, array in weights.items():
            assert torch.equal(own[name], torch.from_numpy(array))


def test_the_first_round_is_fedavgs_first_round(opened: Opened, weights: dict[str, Any]) -> None:
    alone, federated = (
        answer(opened("local")),
        answer(opened("fedavg", weights)),
    )
    for key in ("incoming.test.loss", "trained.train.loss", "trained.val.entropy"):
        assert alone[METRICS][key] == federated[METRICS][key]


def test_a_site_goes_on_from_its_own_weights_and_sends_none(opened: Opened) -> None:
    first = opened("local", round=1)
    reply = answer(first)
    assert ARRAYS not in reply
    assert reply[METRICS]["kept-state"] == 1
    kept = first.state_files.load_before(Instruction(2, "train"))
    assert kept is not None
    second = weights_of(opened("local", round=2))
    for name, tensor in kept.items():
        assert torch.equal(second[name], tensor)
    assert not torch.equal(weights_of(opened("local", round=1))["head.4.bias"], kept["head.4.bias"])


def test_the_trained_model_is_what_the_next_round_measures(opened: Opened) -> None:
    trained = answer(opened("local", round=1))[METRICS]
    later = evaluate(opened("local", round=2, phase="evaluate"))[METRICS]
    # Same weights, other dropout draws: accuracy-like numbers stay close, not equal.
    assert later["incoming.val.loss"] == pytest.approx(trained["trained.val.loss"], rel=0.05)
    assert later["incoming.val.loss"] != trained["incoming.val.loss"]


def test_an_evaluation_stores_nothing(opened: Opened) -> None:
    method = opened("local", round=1, phase="evaluate")
    assert evaluate(method)[METRICS]["kept-state"] == 0
    assert not method.state_files.folder.exists()


def test_a_round_done_again_gives_the_same_weights(opened: Opened) -> None:
    answer(opened("local", round=1))
    answer(opened("local", round=2))
    first = weights_of(opened("local", round=3))
    answer(opened("local", round=2))
    again = weights_of(opened("local", round=3))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_sites_state_is_no_other_sites(opened: Opened, weights: dict[str, Any]) -> None:
    answer(opened("local", site="s1a", round=1))
    other = weights_of(opened("local", site="s2a", round=2))
    assert torch.equal(other["head.4.bias"], torch.from_numpy(weights["head.4.bias"]))


def test_a_state_that_is_gone_stops_the_site_and_is_not_replaced_by_the_first(
    opened: Opened,
) -> None:
    with pytest.raises(CheckpointError, match="site s1a is gone from"):
        answer(opened("local", round=2, expects_state=True))


def test_a_damaged_state_stops_the_site_and_names_it(opened: Opened) -> None:
    method = opened("local", round=1)
    answer(method)
    (path,) = method.state_files.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="private state of site s1a"):
        answer(opened("local", round=2))


# At the server


def test_no_array_crosses_the_wire_in_either_direction(
    shared_run: SharedRun, tiny: Callable[..., dict[str, Any]]
) -> None:
    grid, strategy, _ = shared_run(tiny("local"))
    assert len(grid.replies) == 12  # hello, two rounds and the evaluation at three sites
    for message in [*grid.sent, *grid.replies]:
        assert not message.has_error()
        assert not message.content.array_records
    assert not strategy.state.arrays


def test_a_site_that_sends_its_weights_all_the_same_is_refused(
    spy_grid: Any,
    fake_app: Any,
    content: Any,
    measured: dict[str, float],
    participants: Participants,
) -> None:
    app = fake_app(
        lambda message: content(**measured),
        s2a=lambda message: content({"w": [1.0]}, **measured),
    )
    common = CommonSettings(rounds=1, silos=3, run_name="run")
    strategy = RoundLoop(Local(common, NoSettings(), participants), run_dir="/somewhere")
    with refuses(SiteError, "s2a", "w"):
        strategy.start(spy_grid(app), 1)


def test_sites_of_a_real_run_are_known_to_keep_state_from_their_first_reply_on(
    shared_run: SharedRun, tiny: Callable[..., dict[str, Any]], told: Any
) -> None:
    grid, strategy, _ = shared_run(tiny("local"))
    assert strategy.state.stateful_sites == ("s1a", "s2a", "s3a")
    expected = [told(message)["expects-state"] for message in grid.sent[3:]]
    assert expected == [0] * 3 + [ROUND_KEYS] * 3 + [2 * ROUND_KEYS] * 3


def test_nothing_but_metrics_is_said_to_leave(participants: Participants) -> None:
    strategy = Local(CommonSettings(silos=9, dataset="mnist"), NoSettings(), participants)
    assert strategy.disclosures().leaves == ()
