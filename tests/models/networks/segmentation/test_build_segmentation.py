"""Segmentation networks and their loss, by numbers one can check by hand."""

import dataclasses
import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.networks.encoders import ConvEncoder
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.segmentation.build_segmentation import (
    PyramidNetwork,
    build_segmentation,
    segmentation_loss,
)
from fedsilo.models.networks.segmentation.pyramids import ConvPyramid, TransPyramid, ViTPyramid
from fedsilo.models.networks.segmentation.swin import PatchExpand, SwinUnet, swin_shape
from tests.support.errors import refuses

NETWORKS = ("unet", "vit", "swin", "transunet", "swinunet")
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
    network = build_segmentation(kind, SETTINGS, NetworkShape((1, *size), 2))
    images = torch.randn(3, 1, *size)
    assert network(images).shape == (3, 2, *size)
    coarsest = network.coarsest(images)
    assert size[0] * coarsest.shape[3] == size[1] * coarsest.shape[2]
    if isinstance(network, PyramidNetwork):
        maps = network.pyramid(images)
        assert [m.shape[1] for m in maps] == list(network.pyramid.widths)
        sides = [m.shape[2] for m in maps]
        assert sides == sorted(set(sides), reverse=True)
        assert sides[0] == size[0]
        assert coarsest.shape == maps[-1].shape


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_weight_that_is_trained_has_a_gradient(kind: str) -> None:
    network = build_segmentation(kind, SETTINGS, NetworkShape((1, 32, 32), 2))
    segmentation_loss(network(torch.randn(2, 1, 32, 32)), torch.ones(2, 32, 32)).backward()
    idle = [name for name, p in network.named_parameters() if p.grad is None]
    # A ViT's own head classifies images, not pixels
    assert [name for name in idle if not name.startswith("pyramid.network.head.")] == []


@pytest.mark.parametrize("kind", NETWORKS)
def test_initial_weights_are_a_function_of_the_seed_alone(kind: str) -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        torch.rand(3)
        settings = dataclasses.replace(SETTINGS, seed=seed)
        return build_segmentation(kind, settings, NetworkShape((1, 32, 32), 2)).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_new_network_calls_almost_all_background(kind: str) -> None:
    network = build_segmentation(kind, SETTINGS, NetworkShape((1, 32, 32), 3))
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


def test_encode_with_layers_returns_the_tokens_before_each_layer_in_order() -> None:
    network = build_segmentation("vit", SETTINGS, NetworkShape((1, 32, 48), 2)).eval()
    pyramid = cast(ViTPyramid, cast(PyramidNetwork, network).pyramid)
    assert pyramid.layers == [1, 2], "of four layers, for three scales and the image's own"
    images = torch.randn(2, 1, 32, 48)
    tokens = pyramid.network.encode_with_layers(images)
    assert tokens[-1].shape == (2, 4, 6, 16)
    assert torch.equal(tokens[-1], pyramid.network.encode_with_map(images)[1])
    vit = pyramid.network.vit
    prompts = pyramid.network._layer_prompts()
    x = vit._pos_embed(vit.patch_embed(images * pyramid.network.scale + pyramid.network.offset))
    from fedsilo.models.networks.prefix_attention import prefix_attention

    block = vit.blocks[0]
    x = x + prefix_attention(block.attn, block.norm1(x), prompts[0])[0]
    x = x + block.mlp(block.norm2(x))
    torch.testing.assert_close(tokens[1], x[:, 1:].reshape(2, 4, 6, 16))


def test_a_trunk_bears_a_run_s_names() -> None:
    task = NetworkShape((1, 32, 32), 2)
    unet, vit, below = (
        build_segmentation(kind, SETTINGS, task).trunk() for kind in ("unet", "vit", "transunet")
    )
    assert unet is not None
    assert vit is not None
    assert below is not None
    assert "encoder.stages.0.weight" in unet.state_dict()
    assert {"encoder.vit.pos_embed", "prompts.b"} <= vit.state_dict().keys()
    assert vit.state_dict().keys() - below.state_dict().keys() == {
        "encoder.vit.patch_embed.proj.weight",
        "encoder.vit.patch_embed.proj.bias",
    }
    assert build_segmentation("swin", SETTINGS, task).trunk() is None
    assert build_segmentation("swinunet", SETTINGS, task).trunk() is None


@pytest.mark.parametrize(
    ("patch", "widths"), [(2, [4, 16]), (8, [4, 8, 16, 16]), (16, [4, 8, 16, 16, 16])]
)
def test_below_a_vit_lie_the_convolutional_encoder_s_maps(patch: int, widths: list[int]) -> None:
    settings = dataclasses.replace(SETTINGS, backbone_patch=patch)
    network = build_segmentation("transunet", settings, NetworkShape((1, 32, 48), 2)).eval()
    pyramid = cast(TransPyramid, cast(PyramidNetwork, network).pyramid)
    images = torch.randn(2, 1, 32, 48)
    maps = pyramid(images)
    assert [m.shape[1] for m in maps] == widths
    assert maps[-1].shape[2:] == (32 // patch, 48 // patch)
    # The ViT sees what the convolutions make, in the order of its position embeddings
    embedded = pyramid.embed(pyramid.stages(images))
    tokens = pyramid.network.encode_patches(embedded.flatten(2).mT)
    assert torch.equal(maps[-1], pyramid.project(tokens.permute(0, 3, 1, 2)))


def test_patches_embedded_elsewhere_pass_as_the_vit_s_own() -> None:
    network = build_segmentation("vit", SETTINGS, NetworkShape((1, 32, 48), 2)).eval()
    vit = cast(ViTPyramid, cast(PyramidNetwork, network).pyramid).network
    images = torch.randn(2, 1, 32, 48)
    own = vit.vit.patch_embed(images * vit.scale + vit.offset)
    assert torch.equal(vit.encode_patches(own), vit.encode_with_map(images)[1])


def test_a_patch_is_expanded_to_its_cells_by_hand() -> None:
    expand = PatchExpand(1, 2, 2)
    with torch.no_grad():  # its four cells' two channels: 1 2, 3 4, 5 6, 7 8 of the cell's value
        expand.linear.weight.copy_(torch.arange(1.0, 9.0)[:, None])
    expand.norm = torch.nn.Identity()  # type: ignore[assignment]
    cells = torch.tensor([[[[1.0], [10.0]]]])
    rows = [[[1, 2], [3, 4], [10, 20], [30, 40]], [[5, 6], [7, 8], [50, 60], [70, 80]]]
    assert expand(cells).tolist() == [rows]


def test_the_finest_map_of_a_swin_unet_s_encoder_reaches_the_way_up_at_its_own_place() -> None:
    network = build_segmentation("swinunet", SETTINGS, NetworkShape((1, 64, 64), 2))
    assert isinstance(network, SwinUnet)
    assert [len(part) for part in (network.expand, network.join, network.way_up)] == [2, 2, 2]
    channels = cast(Any, network.swin).feature_info.channels()
    assert [join.in_features for join in network.join] == [2 * channels[1], 2 * channels[0]]
    assert network.coarsest(torch.randn(1, 1, 64, 64)).shape == (1, channels[2], 4, 4)


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
        ("swin", (36, 36), [8, 16]),
        ("swinunet", (8, 64), [16]),
        ("transunet", (36, 36), [8, 36]),
        ("unet", (7, 64), []),
        ("vit", (36, 36), [8, 36]),
    ],
)
def test_images_that_do_not_fit_are_refused(
    kind: str, size: tuple[int, int], told: list[object]
) -> None:
    with refuses(SettingError, *told):
        build_segmentation(kind, SETTINGS, NetworkShape((1, *size), 2))


def test_a_vit_whose_patch_is_no_power_of_two_has_no_maps_below_it() -> None:
    settings = dataclasses.replace(SETTINGS, backbone_patch=6)
    with refuses(SettingError, "6", "vit.backbone-patch", "8", "16"):
        build_segmentation("transunet", settings, NetworkShape((1, 36, 36), 2))


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
