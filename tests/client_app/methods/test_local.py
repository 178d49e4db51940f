from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from fedsilo.client_app.methods.base import SiteMethod
from fedsilo.client_app.site_round import SiteRound
from fedsilo.models.contract.errors import CheckpointError
from fedsilo.models.contract.messages import ARRAYS, METRICS, Instruction
from fedsilo.models.networks.exchanged import exchanged_arrays

Opened = Callable[..., SiteMethod]


def state_of(method: SiteMethod) -> dict[str, torch.Tensor]:
    return exchanged_arrays(cast(nn.Module, method.open_network()))


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
        SiteRound(opened("local")).answer(),
        SiteRound(opened("fedavg", weights)).answer(),
    )
    for key in ("incoming.test.loss", "trained.train.loss", "trained.val.entropy"):
        assert alone[METRICS][key] == federated[METRICS][key]


def test_a_site_goes_on_from_its_own_weights_and_sends_none(opened: Opened) -> None:
    first = opened("local", round=1)
    reply = SiteRound(first).answer()
    assert ARRAYS not in reply
    assert reply[METRICS]["kept-state"] == 1
    kept = first.context.state.before(Instruction(2, "train"))
    assert kept is not None
    second = state_of(opened("local", round=2))
    for name, tensor in kept.items():
        assert torch.equal(second[name], tensor)
    assert not torch.equal(state_of(opened("local", round=1))["head.4.bias"], kept["head.4.bias"])


def test_the_trained_model_is_what_the_next_round_measures(opened: Opened) -> None:
    trained = SiteRound(opened("local", round=1)).answer()[METRICS]
    later = SiteRound(opened("local", round=2, phase="evaluate")).measure_only()[METRICS]
    # Same weights, other dropout draws: accuracy-like numbers stay close, not equal.
    assert later["incoming.val.loss"] == pytest.approx(trained["trained.val.loss"], rel=0.05)
    assert later["incoming.val.loss"] != trained["incoming.val.loss"]


def test_an_evaluation_stores_nothing(opened: Opened) -> None:
    method = opened("local", round=1, phase="evaluate")
    assert SiteRound(method).measure_only()[METRICS]["kept-state"] == 0
    assert not method.context.state.folder.exists()


def test_a_round_done_again_gives_the_same_weights(opened: Opened) -> None:
    SiteRound(opened("local", round=1)).answer()
    SiteRound(opened("local", round=2)).answer()
    first = state_of(opened("local", round=3))
    SiteRound(opened("local", round=2)).answer()
    again = state_of(opened("local", round=3))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_sites_state_is_no_other_sites(opened: Opened, weights: dict[str, Any]) -> None:
    SiteRound(opened("local", site="s1a", round=1)).answer()
    other = state_of(opened("local", site="s2a", round=2))
    assert torch.equal(other["head.4.bias"], torch.from_numpy(weights["head.4.bias"]))


def test_a_state_that_is_gone_stops_the_site_and_is_not_replaced_by_the_first(
    opened: Opened,
) -> None:
    with pytest.raises(CheckpointError, match="site s1a is gone from"):
        SiteRound(opened("local", round=2, expects_state=True)).answer()


def test_a_damaged_state_stops_the_site_and_names_it(opened: Opened) -> None:
    method = opened("local", round=1)
    SiteRound(method).answer()
    (path,) = method.context.state.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="private state of site s1a"):
        SiteRound(opened("local", round=2)).answer()
