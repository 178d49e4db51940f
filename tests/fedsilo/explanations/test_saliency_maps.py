"""Grad-CAM and occlusion: maps by hand, where a bright square is, and what is refused."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fedsilo.client_app.lab import Lab
from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.loop import LocalTraining
from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import build
from fedsilo.datasets.silo.silos import Split
from fedsilo.explanations.image_explanation import ImageExplanation
from fedsilo.explanations.saliency_maps import (
    explain_by_grad_cam,
    explain_by_occlusion,
    grad_cam,
    last_maps,
    occlusion,
)
from fedsilo.explanations.sample import explain_sample
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.encoders import ConvEncoder, ResidualBlock, float_inputs
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.mixture import Mixture
from fedsilo.models.networks.resnet22 import ResNet22
from fedsilo.models.networks.site_network import TokenClassifier, exchanged_arrays
from tests.support.errors import refuses

CPU = Compute(torch.device("cpu"), bf16=False)
Opened = Callable[..., Lab]


def settings(network: str, **values: Any) -> CommonSettings:
    return build(
        CommonSettings, {"method": "fedavg", "network.name": network, "network.width": 2, **values}
    )


def identity(weights: Tensor) -> TokenClassifier:
    """Return a network whose last maps (2, 2, 2) are its inputs; ``weights`` (classes, 2, 2, 2)."""
    encoder = ConvEncoder(in_channels=2, width=1)
    block = ResidualBlock(2)
    nn.init.zeros_(cast(nn.Conv2d, block.body[3]).weight)  # the shortcut alone is left
    encoder.stages = nn.Sequential(block)
    head = nn.Linear(8, len(weights), bias=False)
    with torch.no_grad():
        head.weight.copy_(weights.flatten(2).transpose(1, 2).flatten(1))
    return TokenClassifier(encoder, head, tokens=4, channels=2)


MAPS = torch.tensor([[[1.0, 2.0], [0.0, 4.0]], [[3.0, 0.0], [1.0, 1.0]]])
# Mean gradients: of class 0 (-1, 0), of class 1 (1, -2)
GRADIENTS = torch.tensor(
    [
        [[[-1.0, -1.0], [-1.0, -1.0]], [[3.0, -3.0], [1.0, -1.0]]],
        [[[4.0, 0.0], [0.0, 0.0]], [[-2.0, -4.0], [0.0, -2.0]]],
    ]
)


def test_a_map_is_the_relu_of_maps_weighed_by_their_mean_gradients() -> None:
    network = identity(GRADIENTS)
    assert torch.equal(grad_cam(network, MAPS[None], 0), torch.zeros(1, 2, 2))
    # 1 * first - 2 * second: -5, 2; -2, 2
    expected = torch.tensor([[[0.0, 2.0], [0.0, 2.0]]])
    torch.testing.assert_close(grad_cam(network, MAPS[None], 1), expected)


def test_of_a_network_with_two_views_it_is_the_mean_of_both_views_maps() -> None:
    """Views x and 3 x of the maps above: the same gradients each, so the map once and thrice."""

    class Views(TokenClassifier):
        views = 2

        def encode(self, inputs: Tensor) -> Tensor:
            tokens = super().encode(torch.cat([inputs, 3 * inputs]))
            return cast(Tensor, sum(tokens.chunk(2)))

    single = identity(GRADIENTS)
    network = Views(single.encoder, single.head, tokens=4, channels=2)
    expected = grad_cam(single, MAPS[None], 0)
    torch.testing.assert_close(grad_cam(network, MAPS[None], 0), 2 * expected)


@pytest.mark.parametrize(
    ("kind", "size", "places"), [("resnet22", 96, 2), ("conv", 32, 8), ("vgg16-bn", 64, 4)]
)
def test_the_last_maps_are_those_before_any_pooling(kind: str, size: int, places: int) -> None:
    network = build_classifier(settings(kind), NetworkShape((1, size, size), 3)).eval()
    inputs = torch.randn(2, 1, size, size, generator=torch.Generator().manual_seed(0))
    seen: list[Tensor] = []
    hook = last_maps(network).register_forward_hook(lambda _, __, out: seen.append(out))
    logits = network(inputs)
    hook.remove()
    assert seen[0].shape[2:] == (places, places)
    assert seen[0].min() >= 0
    (gradients,) = torch.autograd.grad(logits[:, 2].sum(), seen[0])
    weights = gradients.mean(dim=(2, 3), keepdim=True)
    by_hand = torch.relu((weights * seen[0]).sum(dim=1)).detach()
    found = grad_cam(network, inputs, 2)
    torch.testing.assert_close(found, by_hand)
    assert found.shape == (2, places, places)


def test_a_single_cell_shows_no_place() -> None:
    network = build_classifier(settings("resnet22"), NetworkShape((1, 64, 64), 2)).eval()
    with pytest.raises(SettingError, match=r"64x64 pixels .* a single cell"):
        grad_cam(network, torch.randn(1, 1, 64, 64), 0)


def test_the_last_maps_of_resnet22_are_what_is_averaged() -> None:
    network = build_classifier(settings("resnet22"), NetworkShape((1, 96, 96), 2)).eval()
    encoder, seen = cast(ResNet22, network.encoder), []
    hook = last_maps(network).register_forward_hook(lambda _, __, out: seen.append(out))
    embedding = encoder(torch.randn(1, 1, 96, 96))
    hook.remove()
    torch.testing.assert_close(embedding, seen[0].mean(dim=(2, 3), keepdim=True))
    # The hook's place has no weights: the published names stay
    assert not any("final_relu" in name for name in exchanged_arrays(network))


def test_neither_the_image_nor_the_weights_are_touched_and_frozen_ones_do() -> None:
    network = identity(GRADIENTS)
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    network.train()
    inputs = MAPS[None].clone()
    assert grad_cam(network, inputs, 1).max() == 2
    assert not inputs.requires_grad
    assert all(parameter.grad is None for parameter in network.parameters())


def squares(count: int, seed: int) -> tuple[Split, Tensor]:
    """Return images (count, 1, 32, 32), of class 1 with a bright square, and its quadrants."""
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 60, (count, 1, 32, 32), generator=draw, dtype=torch.uint8)
    labels, quadrants = torch.arange(count) % 2, torch.randint(0, 4, (count,), generator=draw)
    for index, quadrant in enumerate(quadrants.tolist()):
        down, right = torch.randint(1, 10, (2,), generator=draw).tolist()
        top, left = 16 * (quadrant // 2) + down, 16 * (quadrant % 2) + right
        if labels[index]:
            images[index, 0, top : top + 6, left : left + 6] = 220
    return Split(images, labels), quadrants


def test_the_map_of_a_class_lies_where_its_square_lies() -> None:
    common = settings(
        "conv",
        **{
            "network.width": 4,
            "network.dropout": 0.0,
            "train.learning-rate": 0.01,
            "train.local-epochs": 5,
        },
    )
    network = build_classifier(common, NetworkShape((1, 32, 32), 2))
    LocalTraining(network, squares(256, 1)[0], common, CPU, (1, "site")).run()
    test, quadrants = squares(32, 2)
    maps = grad_cam(network, float_inputs(test.inputs[1::2]), 1)
    parts = maps.reshape(16, 2, 4, 2, 4).sum(dim=(2, 4)).flatten(1)
    shares = parts / parts.sum(dim=1, keepdim=True)
    assert torch.equal(shares.argmax(dim=1), quadrants[1::2])
    assert shares.max(dim=1).values.mean() > 0.7


def test_a_site_explains_an_image_by_the_map_of_what_it_says(
    opened: Opened, weights: dict[str, Any]
) -> None:
    method = opened("fedavg", weights)
    found = cast(ImageExplanation, explain_sample(method, "test", 3))
    label = int(method.silo.test.labels[3])
    assert found.title == f"s1a, test row 3: truth {label}"
    network = cast(TokenClassifier, method.open()).eval()
    image = method.silo.test.inputs[3:4]
    logits = network(float_inputs(image))[0]
    assert found.probabilities == pytest.approx(logits.softmax(dim=0).tolist(), abs=1e-6)
    assert found.saliency.label == found.answer() == int(logits.argmax())
    by_hand = grad_cam(network, float_inputs(image), found.answer())[0]
    torch.testing.assert_close(found.saliency.values, by_hand)
    assert (found.beliefs, found.vacuity) == ([], None)
    with refuses(DataError, 10):
        explain_sample(method, "test", 10)


def test_grad_cam_of_an_evidential_network_has_beliefs_and_takes_a_label() -> None:
    common = settings("conv", **{"train.loss": "evidential"})
    network = build_classifier(common, NetworkShape((1, 16, 16), 2))
    split = squares(2, 0)[0]
    small = Split(split.inputs[:, :, :16, :16], split.labels)
    found = explain_by_grad_cam(network, small, CPU, 1, "", ["a", "b"])
    assert found.vacuity is not None
    assert sum(found.beliefs) + found.vacuity == pytest.approx(1, abs=1e-5)
    other = explain_by_grad_cam(network, small, CPU, 1, "", ["a", "b"], 1 - found.answer())
    assert other.saliency.label == 1 - found.answer()
    assert other.probabilities == found.probabilities


def test_networks_without_maps_of_their_own_are_refused(opened: Opened) -> None:
    row = build_classifier(settings("mlp"), NetworkShape((5,), 2))
    for network in (row, opened("fedevprompt").open()):
        with refuses(SettingError, "fedsilo attention"):
            last_maps(network)
    mixed = Mixture({"a": identity(GRADIENTS), "b": identity(GRADIENTS)})
    with pytest.raises(SettingError, match="mixes 2 networks"):
        last_maps(mixed)


class Corner(torch.nn.Module):
    """Answers 1 by how bright the four pixels at the top left are."""

    def forward(self, images: Tensor) -> Tensor:
        bright = images[:, 0, :2, :2].sum(dim=(1, 2))
        return torch.stack([torch.zeros_like(bright), bright], dim=1)


def test_only_the_place_that_the_answer_rests_on_has_a_value() -> None:
    image = torch.zeros(1, 1, 16, 12)
    image[:, :, :2, :2] = 1.0
    values = occlusion(Corner(), image, 1)  # type: ignore[arg-type]
    assert values.shape == (8, 6)
    mean = 4 / (16 * 12)
    fall = torch.sigmoid(torch.tensor(4.0)) - torch.sigmoid(torch.tensor(4 * mean))
    torch.testing.assert_close(values[0, 0], fall)
    assert values.flatten()[1:].abs().max() == 0


def test_an_image_of_odd_size_is_covered_and_explained_in_words() -> None:
    split = Split(torch.rand(2, 3, 17, 9), torch.zeros(2, dtype=torch.int64))
    found = explain_by_occlusion(Corner(), split, 1, "one", ["a", "b"], CPU)  # type: ignore[arg-type]
    assert found.saliency.values.shape == (6, 5)
    assert "rests most on row 1, column 1 of 6 x 5 squares" in found.lines()[-1]
