from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

from client_app.device import Compute
from client_app.training import batches, train_locally
from datasets.silos import Silo, Split
from models.errors import SiteError
from models.networks import TokenClassifier, build_classifier
from models.settings import CommonSettings

CPU = Compute(torch.device("cpu"), bf16=False)


def order(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@hypothesis_settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 200), size=st.integers(2, 40))
def test_an_epoch_holds_each_index_once_and_no_batch_of_one(count: int, size: int) -> None:
    parts = batches(count, size, order())
    assert sorted(torch.cat(parts).tolist()) == list(range(count))
    assert all(len(part) == size for part in parts[:-2])
    if count > 1:
        assert all(2 <= len(part) <= size + 1 for part in parts)


def test_a_last_batch_of_one_joins_the_batch_before_it() -> None:
    assert [len(part) for part in batches(33, 16, order())] == [16, 17]
    assert [len(part) for part in batches(34, 16, order())] == [16, 16, 2]
    assert [len(part) for part in batches(1, 16, order())] == [1]


def test_the_order_follows_the_generator() -> None:
    first, again, other = (torch.cat(batches(50, 8, order(seed))) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


class Counting(nn.Module):
    """A network whose loss is the mean of its images, times one plus nothing."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.factor = factor
        self.seen: list[int] = []

    def encode(self, images: Tensor) -> Tensor:
        return images

    def discretise(self, tokens: Tensor) -> Tensor:
        return tokens

    def classify(self, features: Tensor) -> Tensor:
        return features

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        self.seen += labels.tolist()
        return (images.mean() + 0 * self.weight.sum()) * self.factor


def split_of(count: int) -> Split:
    values = torch.arange(count, dtype=torch.float32)
    return Split(values.reshape(-1, 1, 1, 1), values.long())


def test_the_loss_is_the_mean_over_samples_not_over_batches(common: CommonSettings) -> None:
    # 21 samples in batches of 16 and 5: a mean over batches would depend on their order.
    for epochs in (1, 3):
        settings = dataclasses.replace(common, local_epochs=epochs)
        loss = train_locally(Counting(), split_of(21), settings, CPU, (1, "s1a"))
        assert loss == pytest.approx(10.0)


def test_the_order_of_samples_is_keyed_on_round_and_site(common: CommonSettings) -> None:
    def seen(*key: int | str) -> list[int]:
        network = Counting()
        train_locally(network, split_of(20), common, CPU, key)
        return network.seen

    assert seen(1, "s1a") == seen(1, "s1a")
    assert seen(1, "s1a") != seen(2, "s1a")
    assert seen(1, "s1a") != seen(1, "s2a")


def test_each_epoch_shows_each_sample_once_in_another_order(common: CommonSettings) -> None:
    network = Counting()
    train_locally(network, split_of(20), dataclasses.replace(common, local_epochs=3), CPU, (1, "a"))
    epochs = [network.seen[i : i + 20] for i in range(0, 60, 20)]
    assert len(network.seen) == 60
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_diverging_training_says_what_to_lower(common: CommonSettings, factor: float) -> None:
    # The server adds site and round.
    said = r"^training diverged, its loss is (nan|inf): lower 'learning-rate'$"
    with pytest.raises(SiteError, match=said):
        train_locally(Counting(factor), split_of(20), common, CPU, (17, "s2b"))


def test_a_far_too_large_step_is_found_out(common: CommonSettings, silo: Silo) -> None:
    wild = dataclasses.replace(common, learning_rate=1e30, local_epochs=3)
    network = build_classifier(common, silo.task)
    with pytest.raises(SiteError, match=r"^training diverged, its loss is .*'learning-rate'"):
        train_locally(network, silo.train, wild, CPU, (2, "s1a"))


def trained(common: CommonSettings, silo: Silo, key: tuple[Any, ...]) -> tuple[float, bytes]:
    network: TokenClassifier = build_classifier(common, silo.task)
    loss = train_locally(network, silo.train, common, CPU, key)
    state = network.state_dict()
    return loss, b"".join(state[name].numpy().tobytes() for name in sorted(state))


def test_training_is_the_same_bits_for_the_same_key(common: CommonSettings, silo: Silo) -> None:
    first = trained(common, silo, (1, "s1a"))
    torch.rand(17)  # whatever else the process drew in between
    assert trained(common, silo, (1, "s1a")) == first


@pytest.mark.parametrize("key", [(2, "s1a"), (1, "s2a")])
def test_another_round_or_site_draws_other_numbers(
    common: CommonSettings, silo: Silo, key: tuple[int, str]
) -> None:
    assert trained(common, silo, key)[1] != trained(common, silo, (1, "s1a"))[1]


def test_training_leaves_the_processes_random_numbers_alone(
    common: CommonSettings, silo: Silo
) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    trained(common, silo, (1, "s1a"))
    assert torch.equal(torch.rand(4), expected)


def test_training_lowers_the_loss(common: CommonSettings, silo: Silo) -> None:
    network = build_classifier(common, silo.task)
    losses = [
        train_locally(network, silo.train, common, CPU, (round_, "s1a")) for round_ in range(6)
    ]
    assert losses[-1] < losses[0]
