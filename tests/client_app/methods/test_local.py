from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from fedsilo.client_app.lab import Lab
from fedsilo.models.contract.errors import CheckpointError
from fedsilo.models.contract.messages import ARRAYS, METRICS, Instruction
from fedsilo.models.networks.site_network import exchanged_arrays
from tests.support.lab import answer, evaluate

Opened = Callable[..., Lab]


def state_of(method: Lab) -> dict[str, torch.Tensor]:
    return exchanged_arrays(cast(nn.Module, method.open()))


def test_the_first_round_starts_from_the_seeds_weights_as_in_every_method(
    opened: Opened, weights: dict[str, Any]
) -> None:
    for site in ("s1a", "s3a"):
        own = state_of(opened("local", site=site))
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
    kept = first.state_files.before(Instruction(2, "train"))
    assert kept is not None
    second = state_of(opened("local", round=2))
    for name, tensor in kept.items():
        assert torch.equal(second[name], tensor)
    assert not torch.equal(state_of(opened("local", round=1))["head.4.bias"], kept["head.4.bias"])


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
    first = state_of(opened("local", round=3))
    answer(opened("local", round=2))
    again = state_of(opened("local", round=3))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_sites_state_is_no_other_sites(opened: Opened, weights: dict[str, Any]) -> None:
    answer(opened("local", site="s1a", round=1))
    other = state_of(opened("local", site="s2a", round=2))
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
