from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.seeding import seed_generators
from fedsilo.models.contract.settings import CommonSettings
from fedsilo.models.contract.settings_schema import build
from fedsilo.models.methods.distrans import (
    DisTransSettings,
    DoubleChannelClassifier,
    DoubleHead,
    OffsetEmbedding,
    build_embedding,
    double_channels,
    first_offset,
    from_pixels,
    to_pixels,
    transform_images,
)
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.exchanged import exchanged_arrays
from fedsilo.models.networks.kinds import Task
from fedsilo.models.networks.site_network import TokenClassifier
from tests.support.keys import as_keys

DIGITS = Task((1, 16, 16), 10)


def settings(**values: Any) -> CommonSettings:
    named = as_keys(values)
    return build(CommonSettings, {"method": "distrans", "network.width": 2, **named})


def double(alpha: float = 0.2, task: Task = DIGITS, **values: Any) -> DoubleChannelClassifier:
    common = settings(**values)
    network = build_classifier(common, task)
    doubled = double_channels(network, common, DisTransSettings(), task.input_shape)
    doubled.alpha = alpha
    return doubled


def test_two_pixels_are_moved_to_the_offset_and_from_it() -> None:
    image, offset = torch.tensor([[[[1.0, -1.0]]]]), torch.tensor([[[[0.5, 0.0]]]])
    first, second = transform_images(image, offset, 0.2)
    # 0.8 * 1 + 0.2 * 0.5 and 0.8 * -1; 1.2 * 1 - 0.2 * 0.5 and 1.2 * -1
    torch.testing.assert_close(first, torch.tensor([[[[0.9, -0.8]]]]))
    torch.testing.assert_close(second, torch.tensor([[[[1.1, -1.2]]]]))


def test_the_gradient_of_two_pixels_by_hand() -> None:
    """Of first + 3 second the offset's gradient is alpha (1 - 3), at each pixel of each image."""
    images, offset = torch.rand(4, 1, 1, 2), torch.zeros(1, 1, 2, requires_grad=True)
    first, second = transform_images(images, offset.expand(4, 1, 1, 2), 0.25)
    (first + 3 * second).sum().backward()  # type: ignore[no-untyped-call]
    assert offset.grad is not None
    torch.testing.assert_close(offset.grad, torch.full((1, 1, 2), 4 * 0.25 * -2))


@given(st.integers(0, 1000), st.floats(0.01, 3.0))
def test_the_image_is_the_mean_of_its_channels_and_the_offset_can_be_had_back(
    seed: int, alpha: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    images, offsets = torch.randn(2, 3, 1, 4, 4, generator=draw).double()
    first, second = transform_images(images, offsets, alpha)
    torch.testing.assert_close((first + second) / 2, images)
    torch.testing.assert_close(images - (second - first) / (2 * alpha), offsets)


@pytest.mark.parametrize("kind", ["conv", "resnet22", "vgg16-bn"])
def test_it_starts_as_the_network_of_one_channel_where_the_channels_are_alike(kind: str) -> None:
    shape = (3, 32, 32) if kind == "vgg16-bn" else (1, 16, 16)
    task = Task(shape, 10)
    single = build_classifier(settings(network=kind), task).eval()
    network = double(1e-12, task, network=kind).eval()
    images = torch.rand(2, *shape)
    assert network.encode(images).shape == (2, 2 * single.tokens, single.channels)
    torch.testing.assert_close(network(images), single(images), atol=1e-5, rtol=1e-4)


def test_the_logits_read_both_channels_beside_one_another() -> None:
    single = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    for layer, weight in ((single[0], 2.0), (single[2], 3.0)):
        nn.init.constant_(cast(nn.Linear, layer).weight, weight)
        nn.init.constant_(cast(nn.Linear, layer).bias, 1.0)
    head = DoubleHead(single)
    features = torch.tensor([[1.0, 2.0], [-1.0, 0.0]])  # dense: 3 and 5; 0 and 1
    torch.testing.assert_close(head(features), torch.tensor([[13.0], [2.5]]))
    with torch.no_grad():
        head.logits.weight.copy_(torch.tensor([[1.0, 10.0]]))
    torch.testing.assert_close(head(features), torch.tensor([[54.0], [11.0]]))


def test_the_network_is_the_transformation_the_encoder_and_the_head_in_turn() -> None:
    network = double(0.3).eval()
    images = torch.rand(3, 1, 16, 16)
    offset = network.offset.weight.detach().reshape(1, 1, 16, 16)
    channels = transform_images(images, offset, 0.3)
    plain = [TokenClassifier.encode(_bare(network), one) for one in channels]
    expected = network.head(torch.cat(plain, dim=1).flatten(1))
    torch.testing.assert_close(network(images), expected)


def _bare(network: DoubleChannelClassifier) -> TokenClassifier:
    return TokenClassifier(network.encoder, network.head, tokens=1, channels=1)


def test_the_offset_is_an_image_that_precision_does_not_round() -> None:
    network = double()
    assert exchanged_arrays(network)["offset.weight"].shape == (256, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = network.both_channels(torch.zeros(1, 1, 16, 16))
    assert found.dtype == torch.float32
    expected = 0.2 * network.offset.weight.reshape(1, 1, 16, 16)
    torch.testing.assert_close(found, torch.cat([expected, -expected]))


def test_the_first_offset_is_the_seeds_and_within_the_pixels_range() -> None:
    standard, raw = settings(seed=3), settings(seed=3, pixel_scale="raw")
    drawn = first_offset(standard, (1, 28, 28))
    assert torch.equal(drawn, first_offset(standard, (1, 28, 28)))
    assert not torch.equal(drawn, first_offset(standard, (1, 28, 28), "s1a"))
    assert not torch.equal(drawn, first_offset(settings(seed=4), (1, 28, 28)))
    assert -1 <= drawn.min() < -0.95
    assert 0.95 < drawn.max() < 1
    of_raw = first_offset(raw, (1, 28, 28))
    torch.testing.assert_close(of_raw, 127.5 * (drawn + 1))
    torch.testing.assert_close(from_pixels(of_raw, raw), drawn, atol=1e-6, rtol=0)
    assert to_pixels(drawn, standard) is from_pixels(drawn, standard) is drawn


def test_building_it_leaves_other_draws_alone() -> None:
    common = settings()
    single = build_classifier(common, DIGITS)
    with seed_generators(3, "elsewhere"):
        expected = torch.rand(2)
    with seed_generators(3, "elsewhere"):
        double_channels(single, common, DisTransSettings(), (1, 16, 16))
        build_embedding(3, 10, 256)
        assert torch.equal(torch.rand(2), expected)


def test_the_embedding_takes_a_step_down_the_squared_distance() -> None:
    embedding, again = build_embedding(7, 2, 4), build_embedding(7, 2, 4)
    shares, wanted = torch.tensor([0.25, 0.75]).double(), torch.full((4, 1), 0.5).double()
    before = {name: p.detach().clone() for name, p in embedding.named_parameters()}

    def distance(one: OffsetEmbedding) -> Tensor:
        return (one(shares) - wanted).square().mean()

    near = distance(embedding)
    gradients = torch.autograd.grad(distance(again), list(again.parameters()))
    embedding.fit(shares, wanted, 0.1)
    for (name, after), gradient in zip(embedding.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(after.detach(), before[name] - 0.1 * gradient)
    assert distance(embedding) < near
    assert embedding(shares).abs().max() < 1


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("distrans.offset-learning-rate", -1.0, "at least 0"),
        ("distrans.offset-aggregation", "median", "mean"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(SettingError, match=rf"'{key}' must be .*{allowed}"):
        build(DisTransSettings, {key: value})


def test_the_authors_values_hold_unless_they_are_set() -> None:
    assert build(DisTransSettings, {}) == DisTransSettings(1e-3, "mean")


def test_a_plug_whose_head_ends_in_a_linear_layer_is_doubled_and_another_is_refused() -> None:
    body = nn.Conv2d(1, 2, 2)  # of images of 2x2 a map of one place
    common, own = CommonSettings(network="mine:build"), DisTransSettings()
    ends_linear = TokenClassifier(body, nn.Sequential(nn.Linear(2, 3)), tokens=1, channels=2)
    doubled = double_channels(ends_linear, common, own, (1, 2, 2))
    assert doubled(torch.zeros(5, 1, 2, 2)).shape == (5, 3)
    for head in (nn.Identity(), nn.Sequential(nn.Linear(2, 3), nn.Tanh())):
        other = TokenClassifier(body, head, tokens=1, channels=2)
        with pytest.raises(
            SettingError, match=r"'mine:build' is neither: choose another 'network.name'"
        ):
            double_channels(other, common, own, (1, 2, 2))
