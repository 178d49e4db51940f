from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fedsilo.client_app.training.compute import Compute, choose_compute
from fedsilo.client_app.training.private import PrivateTraining
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.site_network import SiteNetwork
from fedsilo.models.privacy.release import Release


def private(told: int, **settings: Any) -> PrivateTraining:
    common = CommonSettings(sample_clip_norm=1.0, **{"noise_multiplier": 1e-9, **settings})
    noise, sampling = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    release = Release(1.0, common.noise_multiplier, 10_000, noise)
    return PrivateTraining(common, told, release, sampling)


@pytest.mark.parametrize(
    ("told", "batch_size", "rate"), [(64, 16, 0.25), (40, 16, 0.4), (16, 16, 1.0), (3, 16, 1.0)]
)
def test_rate_is_the_batch_size_over_the_told_samples_and_at_most_1(
    told: int, batch_size: int, rate: float
) -> None:
    assert private(told, batch_size=batch_size).rate == rate


@pytest.mark.parametrize(
    ("told", "how_long", "steps"),
    [
        (64, {"local_epochs": 3}, 12),  # 64 / 16 = 4 an epoch
        (40, {"local_epochs": 3}, 9),  # 40 / 16 = 2.5, so 3 an epoch
        (10, {"local_epochs": 3}, 3),  # all are in each batch
        (40, {"local_epochs": 3, "local_steps": 5}, 5),
    ],
)
def test_steps_are_those_of_epochs_unless_local_steps_says(
    told: int, how_long: dict[str, int], steps: int
) -> None:
    training = private(told, batch_size=16, **how_long)
    assert training.steps() == steps
    assert sum(map(len, training.plan(told))) == steps, "what is charged is what is trained"


def test_plan_has_passes_of_an_epoch_each_and_the_last_one_cut_short() -> None:
    assert [len(each) for each in private(40, batch_size=16, local_steps=7).plan(40)] == [3, 3, 1]


def test_plan_draws_each_sample_alone_with_the_rate() -> None:
    training = private(40, batch_size=10, local_steps=2000)
    drawn = [batch for each in training.plan(40) for batch in each]
    assert len({len(batch) for batch in drawn}) > 5, "batches differ in size"
    times = torch.bincount(torch.cat(drawn), minlength=40)
    assert (times / 2000).tolist() == pytest.approx([0.25] * 40, abs=0.05)


def test_plan_over_more_samples_than_are_told_keeps_the_told_rate() -> None:
    training = private(20, batch_size=10, local_steps=2000)
    sizes = [len(batch) for each in training.plan(40) for batch in each]
    assert sum(sizes) / len(sizes) == pytest.approx(20, rel=0.05)  # a half of 40


class Line(nn.Module):
    """w x, whose loss is its mean: a sample's gradient is x."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((size,), 2.0))

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean of w x."""
        return (inputs * self.w).sum(dim=-1).mean()


@pytest.fixture(scope="module")
def cpu() -> Compute:
    return choose_compute("cpu", "fp32", 1)


def gradients(
    training: PrivateTraining, network: Line, inputs: Tensor, cpu: Compute, penalty: Any = None
) -> Tensor:
    labels = torch.zeros(len(inputs), dtype=torch.int64)
    module = cast(SiteNetwork, network)
    return training.add_gradients(
        module, network.loss, inputs, labels, training.settings, cpu, penalty
    )


def test_gradients_are_clipped_each_summed_and_divided_by_the_expected_size(cpu: Compute) -> None:
    network, inputs = Line(), torch.tensor([[3.0], [-0.5], [0.2]])
    loss = gradients(private(8, batch_size=2), network, inputs, cpu)
    # 3 is clipped to 1; the expected batch has 2 of 8 samples, the real one 3
    assert network.w.grad is not None
    assert network.w.grad.tolist() == pytest.approx([(1 - 0.5 + 0.2) / 2], abs=1e-6)
    assert float(loss) == pytest.approx((6 - 1 + 0.4) / 3)


def test_a_penalty_of_the_parameters_is_neither_clipped_nor_noised(cpu: Compute) -> None:
    network, inputs = Line(), torch.tensor([[3.0], [-0.5], [0.2]])

    def penalty() -> Tensor:
        return 10 * network.w.sum()

    loss = gradients(private(8, batch_size=2), network, inputs, cpu, penalty)
    assert network.w.grad is not None
    assert network.w.grad.tolist() == pytest.approx([10 + 0.7 / 2])
    assert float(loss) == pytest.approx(1.8 + 20)


def test_an_empty_batch_gives_noise_alone(cpu: Compute) -> None:
    network = Line(40_000)
    training = private(8, batch_size=2, noise_multiplier=6.0)
    assert float(gradients(training, network, torch.zeros(0, 40_000), cpu)) == 0
    assert network.w.grad is not None
    assert float(network.w.grad.mean()) == pytest.approx(0, abs=0.1)
    assert float(network.w.grad.std()) == pytest.approx(6 * 1 / 2, rel=0.02)  # z C / expected
