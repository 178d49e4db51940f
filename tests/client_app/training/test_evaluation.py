import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.evaluation import (
    in_batches,
    measure,
    over_batches,
    predict_batches,
    tokens_of,
)
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.silo.silos import Split
from fedsilo.models.networks.site_network import SiteNetwork

CPU = Compute(torch.device("cpu"), bf16=False)
SETTINGS = CommonSettings(mc_passes=3, seed=7)
KEY = (1, "s1a", "test")


class FixedLogits(SiteNetwork):
    """A network whose images are its logits: (batch, 1, 1, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def encode(self, images: Tensor) -> Tensor:
        self.batches.append(len(images))
        return images.flatten(1)

    def classify(self, features: Tensor) -> Tensor:
        return features

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        raise AssertionError("measuring needs no training loss")


class WithDropout(FixedLogits):
    """The same with batch norm before and dropout after, so that passes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)

    def encode(self, images: Tensor) -> Tensor:
        normed: Tensor = self.norm(images.flatten(1))
        return normed

    def classify(self, features: Tensor) -> Tensor:
        dropped: Tensor = self.drop(features)
        return dropped


def split_of(probabilities: list[list[float]], labels: list[int]) -> Split:
    return Split(torch.tensor(probabilities).log()[:, None, None], torch.tensor(labels))


def test_accuracy_loss_and_entropy_of_two_predictions_by_hand() -> None:
    found = measure(
        FixedLogits(), split_of([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]], [0, 1]), SETTINGS, CPU, KEY
    )
    first = -sum(p * math.log(p) for p in (0.7, 0.2, 0.1))
    second = -sum(p * math.log(p) for p in (0.1, 0.3, 0.6))
    assert found["accuracy"] == 0.5
    assert found["loss"] == pytest.approx(-(math.log(0.7) + math.log(0.3)) / 2, rel=1e-6)
    assert found["entropy"] == pytest.approx((first + second) / 2, rel=1e-6)


def test_a_uniform_prediction_has_the_entropy_log_k() -> None:
    found = measure(FixedLogits(), split_of([[0.25] * 4], [2]), SETTINGS, CPU, KEY)
    assert found["entropy"] == pytest.approx(math.log(4))
    assert found["loss"] == pytest.approx(math.log(4))


def test_a_sure_error_has_a_finite_loss() -> None:
    split = Split(torch.tensor([[1000.0, -1000.0]])[:, None, None], torch.tensor([1]))
    found = measure(FixedLogits(), split, SETTINGS, CPU, KEY)
    assert found == {
        "accuracy": 0.0,
        "loss": pytest.approx(-math.log(1e-12)),
        "entropy": 0.0,
        "calibration-error": 1.0,  # sure of it and never right; one class alone has nothing else
    }


def test_a_watch_sees_the_tokens_of_every_batch_and_adds_its_values() -> None:
    class Watch:
        seen: ClassVar[list[int]] = []

        def see(self, tokens: Tensor) -> None:
            self.seen.append(len(tokens))

        def values(self) -> dict[str, float]:
            return {"watched": float(sum(self.seen))}

    split = split_of([[0.9, 0.1]] * 600, [0] * 600)
    found = measure(FixedLogits(), split, SETTINGS, CPU, KEY, Watch())
    assert Watch.seen == [500, 100]
    assert found["watched"] == 600
    assert found["accuracy"] == 1.0


def test_every_sample_counts_once_over_several_batches() -> None:
    network = FixedLogits()
    split = split_of([[0.9, 0.1]] * 500 + [[0.2, 0.8]] * 250, [0] * 500 + [0] * 250)
    found = measure(network, split, SETTINGS, CPU, KEY)
    assert network.batches == [128, 128, 128, 116, 128, 122], "batches of 500, in parts"
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["loss"] == pytest.approx(-(2 * math.log(0.9) + math.log(0.2)) / 3, rel=1e-5)


def dropout_split() -> Split:
    return Split(
        torch.randn(8, 1, 1, 3, generator=torch.Generator().manual_seed(1)), torch.ones(8).long()
    )


def test_dropout_is_really_on_and_keyed_on_the_message() -> None:
    def entropy(key: tuple[Any, ...], passes: int = 3) -> float:
        settings = CommonSettings(mc_passes=passes, seed=7)
        return measure(WithDropout(), dropout_split(), settings, CPU, key)["entropy"]

    assert entropy(KEY) == entropy(KEY)
    assert entropy(KEY) != entropy((2, "s1a", "test"))
    assert entropy(KEY, 1) != entropy(KEY, 30)


def test_no_passes_mean_one_pass_without_dropout() -> None:
    network, split = WithDropout(), dropout_split()
    settings = CommonSettings(mc_passes=0, seed=7)
    found = predict_batches(network, in_batches(split.inputs), settings, CPU, KEY)
    expected = torch.softmax(split.inputs.flatten(1) / math.sqrt(1 + network.norm.eps), dim=1)
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=0)
    dropped = CommonSettings(mc_passes=1, seed=7)
    one = predict_batches(network, in_batches(split.inputs), dropped, CPU, KEY)
    assert not torch.allclose(one, found, atol=1e-2), "one pass has dropout on"


def test_measuring_has_auc_where_every_class_occurs() -> None:
    split = split_of([[0.2, 0.8], [0.6, 0.4], [0.7, 0.3]], [1, 1, 0])
    found = measure(FixedLogits(), split, SETTINGS, CPU, KEY)
    assert found["auc"] == pytest.approx(1.0)
    assert found["balanced-accuracy"] == pytest.approx(0.75)
    assert found["accuracy"] == pytest.approx(2 / 3)


def test_measuring_leaves_network_and_random_numbers_as_they_were() -> None:
    network = WithDropout()
    network.train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    measure(network, dropout_split(), SETTINGS, CPU, KEY)
    assert torch.equal(torch.rand(3), expected)
    assert network.training
    assert network.norm.training
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_tokens_are_those_of_all_images_with_running_statistics() -> None:
    network = WithDropout()
    network.train()
    split = Split(torch.randn(501, 1, 1, 3), torch.zeros(501).long())
    tokens = tokens_of(network, split, CPU)
    assert tokens.shape == (501, 3)
    assert not tokens.requires_grad
    # Untouched running statistics are mean 0 and variance 1.
    torch.testing.assert_close(tokens, split.inputs.flatten(1) / math.sqrt(1 + network.norm.eps))


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((1001, 3), [500, 500, 1]),
        ((500, 1, 16, 16), [500]),
        ((11, 3, 1024, 1024), [5, 5, 1]),  # 5 of 3 * 2**20 numbers are the most within 2**24
        ((2, 3, 4096, 4096), [1, 1]),  # one image is beyond it, and is measured all the same
        ((0, 3), [0]),
    ],
)
def test_batches_of_measuring_are_bounded_in_samples_and_in_numbers(
    shape: tuple[int, ...], sizes: list[int]
) -> None:
    inputs = torch.zeros((), dtype=torch.uint8).expand(shape)  # takes no memory
    assert [len(part) for part in in_batches(inputs)] == sizes


class FirstNumbers(WithDropout):
    """Its tokens are the first three numbers of an image, however large."""

    def encode(self, images: Tensor) -> Tensor:
        self.batches.append(len(images))
        return super().encode(images.flatten(1)[:, :3])


def test_large_images_are_encoded_a_few_at_a_time_and_draw_what_the_batch_draws() -> None:
    side = 300
    images = torch.randn(60, 1, side, side, generator=torch.Generator().manual_seed(1))
    small = images.flatten(1)[:, :3].reshape(60, 1, 1, 3)
    network = FirstNumbers()
    found = predict_batches(network, in_batches(images), SETTINGS, CPU, KEY)
    assert network.batches == [46, 14], "2^22 numbers are 46 of 90,000"
    expected = predict_batches(WithDropout(), in_batches(small), SETTINGS, CPU, KEY)
    torch.testing.assert_close(found, expected)


def test_images_of_8_bits_are_measured_as_their_float_version() -> None:
    draw = torch.Generator().manual_seed(1)
    bytes_ = torch.randint(0, 256, (40, 1, 1, 3), generator=draw, dtype=torch.uint8)
    floats, labels = bytes_.float() / 127.5 - 1, torch.arange(40) % 3
    assert floats.abs().max() <= 1
    found, expected = (
        measure(WithDropout(), Split(inputs, labels), SETTINGS, CPU, KEY)
        for inputs in (bytes_, floats)
    )
    assert found == expected
    tokens, same = (
        tokens_of(WithDropout(), Split(inputs, labels), CPU) for inputs in (bytes_, floats)
    )
    assert torch.equal(tokens, same)


def test_a_function_over_batches_sees_all_inputs_once_in_eval_mode_and_without_gradient() -> None:
    network, sizes = WithDropout(), []
    network.train()

    def doubled(inputs: Tensor) -> Tensor:
        sizes.append(len(inputs))
        assert not network.training
        return inputs.double() * 2

    inputs = torch.arange(501.0)[:, None].requires_grad_()
    found = over_batches(network, inputs, CPU, doubled)
    assert sizes == [500, 1]
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert found.flatten().tolist() == [2.0 * number for number in range(501)]
    sizes.clear()
    images = torch.zeros(129, 3, 4, 4)
    assert over_batches(network, images, CPU, doubled).shape == images.shape
    assert sizes == [128, 1], "of images a CPU has fewer at once"
