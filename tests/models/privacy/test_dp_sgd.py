import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.privacy.dp_sgd import (
    clipped_gradients,
    noisy_mean,
    poisson_batch,
    with_group_norm,
)
from fedsilo.models.privacy.release import UNITS, Release


def bounded(clip_norm: float, alone: bool = False) -> Release:
    """Return what bounds gradients: of a simulation, or of a real hospital, one at a time."""
    return Release(clip_norm, 1.0, 1, None if alone else torch.Generator())


class Slope(nn.Module):
    """y = w x, with a weight that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))
        self.idle = nn.Parameter(torch.tensor(1.0))

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Half the mean square error; its slope in w is (w x - y) x."""
        return (self.w * inputs - labels).square().mean() / 2


@pytest.mark.parametrize("alone", [True, False])
def test_each_gradient_is_clipped_before_they_are_summed(alone: bool) -> None:
    network = Slope()
    # (2 - 1) 1 = 1; (2 * 3 - 0) 3 = 18, clipped to 5; (2 * 1 - 4) 1 = -2
    inputs, labels = torch.tensor([1.0, 3.0, 1.0]), torch.tensor([1.0, 0.0, 4.0])
    release = bounded(5.0, alone)
    sums, losses = clipped_gradients(network, network.loss, inputs, labels, release)
    assert sums["w"].item() * 5.0 / UNITS == pytest.approx(1 + 5 - 2, abs=1e-5)
    assert sums["idle"].item() == 0
    assert losses.item() == pytest.approx(0.5 + 18 + 2)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_of_a_batch_give_the_same_sum(size: int) -> None:
    network = Slope()
    inputs, labels = torch.tensor([1.0, 3.0, 1.0]), torch.tensor([1.0, 0.0, 4.0])
    sums, _ = clipped_gradients(network, network.loss, inputs, labels, bounded(5.0), size)
    assert sums["w"].item() * 5.0 / UNITS == pytest.approx(4.0, abs=1e-5)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("network", ["conv", "vgg16-bn", "resnet22"])
def test_without_clipping_the_sum_is_the_batchs_gradient(network: str, alone: bool) -> None:
    settings = CommonSettings(network=network, width=4, dropout=0.0, sample_clip_norm=1.0)
    channels = 3 if network == "vgg16-bn" else 1
    model = build_classifier(settings, NetworkShape((channels, 32, 32), 3)).train()
    rng = torch.Generator().manual_seed(3)
    inputs = torch.randn(4, channels, 32, 32, generator=rng)
    labels = torch.tensor([0, 1, 2, 1])
    sums, total = clipped_gradients(model, model.loss, inputs, labels, bounded(1e3, alone))
    loss = model.loss(inputs, labels)
    loss.backward()
    assert total.item() / 4 == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        mean = sums[name].double() * 1e3 / UNITS / 4
        assert torch.allclose(mean, parameter.grad.double(), atol=1e-4), name


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=6),
    st.floats(width=32),
    st.floats(1e-45, 1e38),
)
def test_one_more_patient_moves_the_sum_by_at_most_the_clip_norm(
    others: list[float], patient: float, clip_norm: float
) -> None:
    network = Slope()

    def summed(values: list[float]) -> int:
        inputs, labels = torch.tensor(values), torch.zeros(len(values))
        release = bounded(clip_norm, alone=True)
        sums, _ = clipped_gradients(network, network.loss, inputs, labels, release)
        return int(sums["w"].item())

    assert abs(summed([*others, patient]) - summed(others)) <= UNITS


def test_an_empty_batch_has_no_gradient() -> None:
    network = Slope()
    sums, losses = clipped_gradients(
        network, network.loss, torch.zeros(0), torch.zeros(0), bounded(1.0)
    )
    assert (sums["w"].item(), losses.item()) == (0, 0)


def test_noisy_mean_divides_by_the_expected_size_and_adds_noise() -> None:
    sums = {"w": torch.full((20_000,), 3 * UNITS)}  # of a bound of 2
    release = Release(2.0, 1.5, 1, torch.Generator().manual_seed(1))
    noisy = noisy_mean(sums, release, 3.0)["w"]
    assert float(noisy.mean()) == pytest.approx(2.0, abs=0.05)
    assert float(noisy.std()) == pytest.approx(1.5 * 2.0 / 3.0, rel=0.02)


def test_poisson_batches_have_each_sample_with_the_rate_alone() -> None:
    rng = torch.Generator().manual_seed(2)
    batches = [poisson_batch(50, 0.1, rng) for _ in range(2000)]
    counts = torch.bincount(torch.cat(batches), minlength=50) / 2000
    assert counts.mean().item() == pytest.approx(0.1, abs=0.005)
    assert counts.max().item() < 0.13
    assert len({len(batch) for batch in batches}) > 8, "sizes differ"
    assert poisson_batch(5, 1.0, rng).tolist() == [0, 1, 2, 3, 4]


def test_every_batch_norm_becomes_a_group_norm_of_its_channels() -> None:
    network = nn.Sequential(nn.Conv2d(1, 24, 3), nn.Sequential(nn.BatchNorm2d(24)), nn.ReLU())
    with_group_norm(network)
    norm = network.get_submodule("1.0")
    assert isinstance(norm, nn.GroupNorm)
    assert (norm.num_groups, norm.num_channels) == (3, 24)


def test_few_channels_are_one_group() -> None:
    network = nn.Sequential(nn.BatchNorm1d(5))
    with_group_norm(network)
    assert network[0].num_groups == 1


@pytest.mark.parametrize("kind", ["conv", "vgg16-bn", "resnet22"])
def test_in_a_private_network_no_sample_changes_anothers_output(kind: str) -> None:
    settings = CommonSettings(network=kind, width=8, dropout=0.0, sample_clip_norm=1.0)
    channels = 3 if kind == "vgg16-bn" else 1
    network = build_classifier(settings, NetworkShape((channels, 32, 32), 2)).train()
    images = torch.randn(2, channels, 32, 32, generator=torch.Generator().manual_seed(1))
    others = torch.cat([images[:1], 100 * images[1:]])
    assert torch.allclose(network(images)[0], network(others)[0], atol=1e-5)
    assert not any(name.endswith("running_mean") for name in network.state_dict())
