"""Segmentation networks and their loss, by numbers one can check by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import cast

import pytest
import torch
from torch import Tensor

from models.contract.errors import SettingError
from models.contract.settings import CommonSettings
from models.networks.encoders import ConvEncoder
from models.networks.kinds import Task
from models.networks.segmentation import (
    NETWORKS,
    ConvPyramid,
    ViTPyramid,
    build_segmentation,
    segmentation_loss,
    swin_shape,
)

SETTINGS = dataclasses.replace(
    CommonSettings(),
    width=4,
    network="vit",
    train_backbone=True,
    backbone_width=16,
    backbone_depth=4,
    backbone_heads=2,
    backbone_patch=8,
    prompt_length=2,
    basic_layers=1,
)


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("size", [(32, 32), (16, 48)])
def test_a_network_gives_logits_of_every_pixel(kind: str, size: tuple[int, int]) -> None:
    network = build_segmentation(kind, SETTINGS, Task((1, *size), 2))
    images = torch.randn(3, 1, *size)
    maps = network.pyramid(images)
    assert [m.shape[1] for m in maps] == list(network.pyramid.widths)
    sides = [m.shape[2] for m in maps]
    assert sides == sorted(sides, reverse=True)
    assert sides[0] == size[0]
    assert network(images).shape == (3, 2, *size)


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_weight_that_is_trained_has_a_gradient(kind: str) -> None:
    network = build_segmentation(kind, SETTINGS, Task((1, 32, 32), 2))
    segmentation_loss(network(torch.randn(2, 1, 32, 32)), torch.ones(2, 32, 32)).backward()
    idle = [name for name, p in network.named_parameters() if p.grad is None]
    # A ViT's own head classifies images, not pixels
    assert [name for name in idle if not name.startswith("pyramid.network.head.")] == []


@pytest.mark.parametrize("kind", NETWORKS)
def test_initial_weights_are_a_function_of_the_seed_alone(kind: str) -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        torch.rand(3)
        settings = dataclasses.replace(SETTINGS, seed=seed)
        return build_segmentation(kind, settings, Task((1, 32, 32), 2)).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_new_network_calls_almost_all_background(kind: str) -> None:
    network = build_segmentation(kind, SETTINGS, Task((1, 32, 32), 3))
    shares = network(torch.randn(4, 1, 32, 32)).softmax(1)[:, 1:].mean(dim=(0, 2, 3))
    assert (shares < 0.05).all()
    assert (shares > 0.005).all()


def test_the_u_net_s_coarsest_map_but_for_its_bottom_is_what_the_encoder_gives() -> None:
    pyramid = ConvPyramid(in_channels=1, width=2).eval()
    images = torch.randn(2, 1, 19, 24)
    encoder = cast(ConvEncoder, pyramid.encoder)
    maps = pyramid(images)
    assert [tuple(m.shape[2:]) for m in maps] == [(19, 24), (9, 12), (4, 6), (2, 3)]
    assert torch.equal(maps[-1], pyramid.bottom(encoder(images)))
    assert torch.equal(torch.nn.functional.max_pool2d(maps[2], 2), encoder(images))


def test_a_vit_gives_its_layers_tokens_in_order_and_keeps_no_hook() -> None:
    network = build_segmentation("vit", SETTINGS, Task((1, 32, 48), 2)).eval()
    pyramid = cast(ViTPyramid, network.pyramid)
    assert pyramid.layers == [1, 2], "of four layers, for three scales and the image's own"
    images = torch.randn(2, 1, 32, 48)
    tokens, last = pyramid._tokens(images)
    assert last.shape == (2, 4, 6, 16)
    assert torch.equal(last, pyramid.network.encode_with_map(images)[1])
    vit = pyramid.network.vit
    prompts = pyramid.network._layer_prompts()
    x = vit._pos_embed(vit.patch_embed(images * pyramid.network.scale + pyramid.network.offset))
    from models.networks.prompted_vit import prefix_attention

    block = vit.blocks[0]
    x = x + prefix_attention(block.attn, block.norm1(x), prompts[0])[0]
    x = x + block.mlp(block.norm2(x))
    torch.testing.assert_close(tokens[1], x[:, 1:].reshape(2, 4, 6, 16))
    assert not any(block.norm1._forward_pre_hooks for block in vit.blocks)


def test_a_trunk_bears_a_run_s_names() -> None:
    task = Task((1, 32, 32), 2)
    unet = build_segmentation("unet", SETTINGS, task).pyramid.trunk()
    vit = build_segmentation("vit", SETTINGS, task).pyramid.trunk()
    assert unet is not None
    assert vit is not None
    assert "encoder.stages.0.weight" in unet.state_dict()
    assert {"encoder.vit.pos_embed", "prompts.b"} <= vit.state_dict().keys()
    assert build_segmentation("swin", SETTINGS, task).pyramid.trunk() is None


@pytest.mark.parametrize(
    ("size", "stages", "window"),
    [((224, 224), 4, 7), ((64, 64), 3, 4), ((128, 128), 4, 4), ((16, 16), 1, 4), ((48, 16), 1, 4)],
)
def test_a_window_divides_every_stage(size: tuple[int, int], stages: int, window: int) -> None:
    assert swin_shape(size) == (stages, window)
    for stage in range(stages):
        assert all(side // 4 // 2**stage % window == 0 for side in size)


@pytest.mark.parametrize(
    ("kind", "size", "told"),
    [
        ("swin", (36, 36), "sides are multiples of 8 and at least 16, and these are 36x36"),
        ("swin", (8, 64), "at least 16, and these are 8x64"),
        ("unet", (7, 64), "leaves nothing of 7x64 pixels"),
        ("vit", (36, 36), "whose patches of 8 pixels do not divide images of 36"),
    ],
)
def test_images_that_do_not_fit_are_refused(kind: str, size: tuple[int, int], told: str) -> None:
    with pytest.raises(SettingError, match=told):
        build_segmentation(kind, SETTINGS, Task((1, *size), 2))


def test_the_loss_is_cross_entropy_plus_soft_dice() -> None:
    # Two pixels, one of the catheter; probability of the catheter 0.75 and 0.25
    logits = torch.tensor([[[[0.0, 0.0]], [[math.log(3), -math.log(3)]]]])
    truth = torch.tensor([[[1, 0]]])
    entropy = -math.log(0.75)
    dice = (2 * 0.75 + 1) / (1.0 + 1 + 1)
    assert segmentation_loss(logits, truth).item() == pytest.approx(entropy + 1 - dice)
    sure = 30 * (2 * truth.float() - 1)
    logits = torch.stack([-sure, sure], dim=1)
    assert segmentation_loss(logits, truth).item() == pytest.approx(0, abs=1e-6)
    assert segmentation_loss(-logits, truth).item() > 30


def test_the_loss_of_a_batch_without_a_catheter_is_finite_and_rewards_finding_none() -> None:
    truth = torch.zeros(2, 3, 3, dtype=torch.uint8)
    none = torch.stack([torch.full((2, 3, 3), 20.0), torch.zeros(2, 3, 3)], dim=1)
    assert segmentation_loss(none, truth).item() == pytest.approx(0, abs=1e-6)
    assert segmentation_loss(none.flip(1), truth).item() > 20
