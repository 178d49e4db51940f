from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from fedsilo.client_app.explain.sample import explain_sample
from fedsilo.client_app.lab import Lab
from fedsilo.client_app.methods.distrans import DisTransSite
from fedsilo.client_app.site.limits import Limits
from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.messages import ARRAYS, METRICS
from fedsilo.models.methods.distrans import OFFSET, DoubleChannelClassifier, double_channels
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.site_network import exchanged_arrays
from tests.support.lab import answer, evaluate, fitted

Opened = Callable[..., Lab]
Weights = Callable[..., dict[str, Any]]
ONE_STEP = {"local_steps": 1, "batch_size": 36, "dropout": 0.0, "optimiser": "sgd"}


@pytest.fixture
def received(resolved: Callable[..., Any]) -> Weights:
    """Return a builder of what the server sends at first, by settings."""

    def make(**own: Any) -> dict[str, Any]:
        settings = resolved("distrans", **own)
        task = Task((1, 16, 16), 10)
        single = build_classifier(settings.common, task)
        network = double_channels(single, settings.common, settings.own, task.input_shape)
        arrays = {name: array.numpy() for name, array in exchanged_arrays(network).items()}
        if settings.own.offset_aggregation == "none":
            del arrays[OFFSET]
        return arrays

    return make


def offset_of(site: DisTransSite) -> torch.Tensor:
    network = cast(DoubleChannelClassifier, site.open())
    return network.offset.weight.detach().clone()


def test_the_network_and_the_offset_come_and_go_back_trained(
    opened: Opened, received: Weights
) -> None:
    sent = received()
    reply = answer(opened("distrans", sent))
    assert set(reply[ARRAYS]) == set(sent)
    moved = {n for n, array in reply[ARRAYS].items() if (array.numpy() != sent[n]).any()}
    assert {OFFSET, "head.logits.weight", "head.dense.1.weight", "encoder.stages.0.weight"} < moved
    assert reply[METRICS]["kept-state"] == 0


@pytest.mark.parametrize("rate", [0.0, 0.5, 2.0])
def test_the_offset_takes_a_step_of_its_own_rate_down_the_gradient_of_the_same_batch(
    opened: Opened, received: Weights, rate: float
) -> None:
    own = {**ONE_STEP, "offset_learning_rate": rate, "learning_rate": 0.125, "weight_decay": 0.5}
    site = opened("distrans", received(**own), own=own)
    network = cast(DoubleChannelClassifier, site.open())
    start = {name: p.detach().clone() for name, p in network.named_parameters()}
    twin = cast(DoubleChannelClassifier, site.open()).train()
    train = site.silo.train
    assert len(train) == 36, "one step must be of the whole training data"
    twin.loss(train.inputs, train.labels).backward()  # type: ignore[no-untyped-call]
    fitted(site, network)
    gradients = {name: cast(torch.Tensor, p.grad) for name, p in twin.named_parameters()}
    after = dict(network.named_parameters())
    wanted = start[OFFSET] - rate * gradients[OFFSET]
    torch.testing.assert_close(after[OFFSET].detach(), wanted)
    assert (after[OFFSET] != start[OFFSET]).any() == (rate > 0)
    name = "head.logits.weight"
    wanted = start[name] - 0.125 * (gradients[name] + 0.5 * start[name])
    torch.testing.assert_close(after[name].detach(), wanted)


def test_an_offset_that_stays_is_drawn_at_the_site_and_goes_on_where_it_was(
    opened: Opened, received: Weights
) -> None:
    own = {"offset_aggregation": "none", "offset_learning_rate": 0.5}
    sent = received(**own)
    first, other = (opened("distrans", sent, site=s, own=own) for s in ("s1a", "s2a"))
    drawn = offset_of(first)
    assert not torch.equal(drawn, offset_of(other)), "each site draws its own"
    reply = answer(first)
    assert OFFSET not in reply[ARRAYS]
    assert set(reply[ARRAYS]) == set(sent)
    assert reply[METRICS]["kept-state"] == 1
    later = opened("distrans", sent, own=own, round=2)
    assert set(later.stored) == {OFFSET}
    assert not torch.equal(offset_of(later), drawn)
    assert torch.equal(offset_of(later), later.stored[OFFSET])
    assert torch.equal(offset_of(opened("distrans", sent, own=own)), drawn), "round 1 asked again"
    final = opened("distrans", sent, own=own, round=2, phase="evaluate")
    assert torch.equal(offset_of(final), later.stored[OFFSET])


def test_an_offset_that_is_sent_to_a_site_that_keeps_its_own_is_not_taken(
    opened: Opened, received: Weights
) -> None:
    own = {"offset_aggregation": "none"}
    sent = received(**own) | {OFFSET: np.zeros((256, 1), np.float32)}
    assert offset_of(opened("distrans", sent, own=own)).abs().max() > 0.5


def test_of_a_finished_runs_offsets_a_site_takes_its_own(opened: Opened, received: Weights) -> None:
    own = {"offset_aggregation": "embedding"}
    sent = received(**own)
    plain = {name: array for name, array in sent.items() if name != OFFSET}
    named = {f"offset/{s}": np.full((256, 1), i, np.float32) for i, s in enumerate(("s1a", "s2a"))}
    found = offset_of(opened("distrans", plain | named, site="s2a", own=own, phase="evaluate"))
    assert found.eq(1).all()


def test_a_missing_offset_and_one_of_other_images_are_refused(
    opened: Opened, received: Weights
) -> None:
    sent = received()
    with pytest.raises(SettingError, match=r"missing \['offset.weight'\]"):
        opened("distrans", {n: a for n, a in sent.items() if n != OFFSET}).open()
    other = sent | {OFFSET: np.zeros((784, 1), np.float32)}
    with pytest.raises(SettingError, match=r"'offset.weight' is \(784, 1\), not \(256, 1\)"):
        opened("distrans", other).open()


def test_epochs_that_span_rounds_leave_the_offset_out_of_the_optimiser(
    opened: Opened, received: Weights
) -> None:
    own = {"epoch_steps": 4, "pace": 2, "local_epochs": 2, "batch_size": 32}
    own |= {"offset_learning_rate": 0.5}
    sent = received(**own)
    reply = answer(opened("distrans", sent, own=own))
    assert (reply[ARRAYS][OFFSET].numpy() != sent[OFFSET]).any()
    stored = opened("distrans", own=own, round=2).stored
    assert [name for name in stored if "head.logits.weight" in name]
    assert not [name for name in stored if OFFSET in name]


def _floors(minimum: int) -> Limits:
    return Limits(minimum_batch=minimum, minimum_steps_per_reply=1)


@pytest.mark.parametrize("network", ["conv", "resnet22"])
def test_a_site_explains_an_image_by_the_map_of_both_channels(
    opened: Opened, resolved: Callable[..., Any], network: str
) -> None:
    own = {"network": network, "width": 2}
    settings = resolved("distrans", **own)
    task = Task((1, 16, 16), 10)
    single = build_classifier(settings.common, task)
    double = double_channels(single, settings.common, settings.own, task.input_shape)
    arrays = {name: array.numpy() for name, array in exchanged_arrays(double).items()}
    site = opened("distrans", arrays, own=own, phase="evaluate")
    if network == "resnet22":
        with pytest.raises(SettingError, match="single cell"):
            explain_sample(site, "test", 0)
        return
    assert explain_sample(site, "test", 0).lines()


def test_monte_carlo_dropout_has_an_entropy(opened: Opened, received: Weights) -> None:
    own = {"dropout": 0.5}
    found = evaluate(opened("distrans", received(**own), own=own, phase="evaluate"))
    assert 0 < float(cast(Any, found[METRICS])["incoming.test.entropy"]) <= np.log(10)
