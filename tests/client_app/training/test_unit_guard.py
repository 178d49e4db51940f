from __future__ import annotations

import math
from typing import cast

import pytest
import torch
from torch import nn

from fedsilo.client_app.training.unit_guard import UnitGuard


def step(network: nn.Module, inputs: torch.Tensor, weights: torch.Tensor, crowd: UnitGuard) -> None:
    """Take a step of rate 1 whose gradient at each output is the sample's weight."""
    crowd.next_pass()
    network.zero_grad(set_to_none=True)
    (network(inputs).flatten(1).sum(dim=1) * weights).sum().backward()
    crowd.add_step()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter -= parameter.grad


@pytest.mark.parametrize(
    ("weights", "trained"),
    [([1.0] * 4, True), ([1.0, 0.0, 0.0, 0.0], False), ([1.0, 0.9, 0.9, 0.3], True)],
)
def test_a_unit_too_few_stand_behind_is_put_back(weights: list[float], trained: bool) -> None:
    layer = nn.Linear(3, 2)
    before = layer.weight.detach().clone(), layer.bias.detach().clone()
    crowd = UnitGuard(layer, 3, {})
    with crowd.watching():
        step(layer, torch.rand(4, 3), torch.tensor(weights), crowd)
    assert bool((layer.weight != before[0]).all()) == trained
    assert bool((layer.bias != before[1]).all()) == trained
    assert crowd.put_back == (0.0 if trained else 1.0)


def test_one_sample_and_many_small_ones_are_no_crowd() -> None:
    """(Σ|g|)² / Σg² would say 8 here; by the largest share there are 3."""
    layer, weights = nn.Linear(3, 1), torch.cat([torch.ones(1), torch.full((171,), 0.011)])
    assert weights.sum() ** 2 / weights.square().sum() > 8
    crowd = UnitGuard(layer, 8, {})
    with crowd.watching():
        step(layer, torch.rand(172, 3), weights, crowd)
    assert crowd.put_back == 1.0


def test_the_same_sample_in_each_pass_counts_once() -> None:
    layer = nn.Linear(3, 1)
    crowd = UnitGuard(layer, 2, {})
    with crowd.watching():
        for _ in range(5):
            step(layer, torch.rand(4, 3), torch.tensor([1.0, 0.0, 0.0, 0.0]), crowd)
    assert crowd.put_back == 1.0


def test_units_are_put_back_one_by_one() -> None:
    """ReLU: the first unit sees all samples, the second one only the last."""
    layer = nn.Linear(1, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0], [1.0]]))
        layer.bias.copy_(torch.tensor([0.0, -3.5]))
    network = nn.Sequential(layer, nn.ReLU(inplace=True))
    before = layer.weight.detach().clone()
    crowd = UnitGuard(network, 2, {})
    with crowd.watching():
        step(network, torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.ones(4), crowd)
    assert (layer.weight != before).flatten().tolist() == [True, False]


def test_what_samples_add_is_told_where_it_cancels_out() -> None:
    """Two samples of 1 and -1 add (1, 1) each; the change is 0 but for a third one's 0.5."""
    layer = nn.Linear(1, 1)
    shares: dict[str, torch.Tensor] = {}
    crowd = UnitGuard(layer, 2, shares)
    with crowd.watching():
        step(layer, torch.ones(3, 1), torch.tensor([1.0, -1.0, 0.5]), crowd)
    added = math.sqrt((1 + 1 + 0.25) * 2 / 1)  # squared norms of (a, 1), over one input
    assert float(shares["weight"]) == pytest.approx(added / 0.5)
    assert float(shares["bias"]) == float(shares["weight"])


def test_a_convolutions_samples_are_its_images() -> None:
    """By hand of autograd: the gradient of each image alone."""
    layer, images = nn.Conv2d(2, 3, 3, padding=1, stride=2), torch.rand(4, 2, 6, 6)
    weights = torch.tensor([1.0, 2.0, 0.5, 1.5])
    shares: dict[str, torch.Tensor] = {}
    crowd = UnitGuard(layer, 2, shares)
    energy, net = torch.zeros(3), torch.zeros(3, 18)
    for image, weight in zip(images, weights, strict=True):
        layer.zero_grad(set_to_none=True)
        (layer(image[None]).sum() * weight).backward()
        assert layer.weight.grad is not None
        assert layer.bias is not None
        assert layer.bias.grad is not None
        own = layer.weight.grad.flatten(1)
        energy += own.square().sum(dim=1) + layer.bias.grad.square()
        net += own
    with crowd.watching():
        step(layer, images, weights, crowd)
    expected = (energy / 18 / net.square().mean(dim=1)).sqrt()
    torch.testing.assert_close(shares["weight"].float(), expected)


def test_without_a_minimum_nothing_is_watched() -> None:
    layer, shares = nn.Linear(3, 2), dict[str, torch.Tensor]()
    crowd = UnitGuard(layer, 1, shares)
    with crowd.watching():
        step(layer, torch.rand(4, 3), torch.tensor([1.0, 0.0, 0.0, 0.0]), crowd)
    assert not shares
    assert crowd.put_back == 0.0


@pytest.mark.parametrize(("values", "moved"), [((0, 0, 0, 8), False), ((0, 3, 6, 9), True)])
def test_a_running_mean_that_one_sample_moves_is_put_back(
    values: tuple[int, ...], moved: bool
) -> None:
    """Of (0, 0, 0, 8) the deviations are 2, 2, 2, 6: two samples by the largest share."""
    norm = nn.BatchNorm1d(1)
    crowd = UnitGuard(norm, 2 if moved else 3, {})
    with crowd.watching():
        crowd.next_pass()
        norm(torch.tensor(values, dtype=torch.float32).unsqueeze(1))
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert (float(norm.running_mean) != 0.0) == moved
    assert (float(norm.running_var) != 1.0) == moved


class Twice(nn.Module):
    """Shows a layer every sample twice, as rows of one batch."""

    views = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first, second = self.layer(torch.cat([inputs, inputs])).chunk(2)
        return cast(torch.Tensor, first + second)


@pytest.mark.parametrize(("weights", "trained"), [([1.0, 0.0], False), ([1.0, 1.0], True)])
def test_a_sample_that_is_seen_twice_is_no_crowd(weights: list[float], trained: bool) -> None:
    network = Twice()
    before = network.layer.weight.detach().clone()
    crowd = UnitGuard(network, 2, {})
    with crowd.watching():
        step(network, torch.ones(2, 1), torch.tensor(weights), crowd)
    assert bool((network.layer.weight != before).all()) is trained
    assert crowd.put_back == (not trained)


def test_of_a_sample_that_is_seen_twice_no_less_is_told_than_it_adds() -> None:
    """Samples of 2, -2 and 1, each half by either view: rows tell half of the square."""
    network, shares = Twice(), dict[str, torch.Tensor]()
    crowd = UnitGuard(network, 2, shares)
    with crowd.watching():
        step(network, torch.ones(3, 1), torch.tensor([1.0, -1.0, 0.5]), crowd)
    added = math.sqrt((4 + 4 + 1) * 2 / 1)  # squared norms of (2 a, 2 a), over one input
    assert float(shares["layer.weight"]) == pytest.approx(added / 1.0)
