"""The prompted ViT: attention written out by hand, timm's own beside, and what is trained."""

from typing import Any, cast

import pytest
import torch
from timm.layers.attention import Attention
from torch import Tensor, nn

from fedsilo.core.errors import SettingError
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.maths.attention_rollout import rollout
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape, check_network_settings
from fedsilo.models.networks.prefix_attention import prefix_attention
from fedsilo.models.networks.prompted_vit import PromptedViT, build_vit
from fedsilo.models.networks.site_network import exchanged_arrays, load_exchanged
from tests.support.errors import refuses
from tests.support.tiny import VIT_FIELDS

COLOUR, GREY = NetworkShape((3, 16, 16), 4), NetworkShape((1, 16, 16), 4)
SMALL = VIT_FIELDS | {
    "dataset": "digits",
    "backbone": "vit_tiny_patch16_224",
    "backbone_depth": 3,
}
PROMPTS_AND_HEAD = ["head.1.bias", "head.1.weight", "prompts.b", "prompts.t"]


def small(**changes: Any) -> CommonSettings:
    return CommonSettings(**{**SMALL, **changes})


def network(task: NetworkShape = COLOUR, **changes: Any) -> PromptedViT:
    return cast(PromptedViT, build_classifier(small(**changes), task))


def images(task: NetworkShape = COLOUR, count: int = 4, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(count, *task.input_shape, generator=draw) * 2 - 1


def random_tensor(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention_by_hand(layer: Attention, x: Tensor, prompts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return eq. 1 sample by sample and head by head, from explicit query, key, value matrices."""
    width, each = layer.proj.in_features, layer.head_dim
    matrices, biases = layer.qkv.weight.split(width), layer.qkv.bias.split(width)
    outs, maps = [], []
    for tokens in x:
        q, k, v = (tokens @ m.T + b for m, b in zip(matrices, biases, strict=True))
        heads, weights = [], []
        for start in range(0, width, each):
            own = slice(start, start + each)
            query, key, value = layer.q_norm(q[:, own]), layer.k_norm(k[:, own]), v[:, own]
            if prompts is not None:
                key = torch.cat([prompts[0][:, own], key])
                value = torch.cat([prompts[1][:, own], value])
            scores = (query @ key.T / each**0.5).exp()
            weights.append(scores / scores.sum(dim=1, keepdim=True))
            heads.append(weights[-1] @ value)
        outs.append(torch.cat(heads, dim=1) @ layer.proj.weight.T + layer.proj.bias)
        maps.append(torch.stack(weights))
    return torch.stack(outs), torch.stack(maps)


def test_two_tokens_and_one_prompt_by_hand() -> None:
    layer = Attention(1, num_heads=1, qkv_bias=False)
    with torch.no_grad():  # q = x, k = x log 2, v = 10 x, and nothing after
        layer.qkv.weight.copy_(torch.tensor([[1.0], [2.0], [10.0]]))
        layer.qkv.weight[1] = torch.tensor(2.0).log()
        layer.proj.weight.fill_(1.0)
        layer.proj.bias.zero_()
    x = torch.tensor([[[0.0], [1.0]]])
    prompts = torch.stack([torch.tensor(3.0).log(), torch.tensor(4.0)]).reshape(2, 1, 1)
    found, weights = prefix_attention(layer, x, prompts, weights=True)
    # the first token's scores are 0; the second's log 3, 0 and log 2
    assert weights is not None
    assert torch.allclose(
        weights[0, 0], torch.tensor([[1 / 3, 1 / 3, 1 / 3], [3 / 6, 1 / 6, 2 / 6]])
    )
    # values 4, 0 and 10: (4 + 0 + 10) / 3 and (3 * 4 + 0 + 2 * 10) / 6
    assert found[0, :, 0].tolist() == pytest.approx([14 / 3, 32 / 6])
    plain, weights = prefix_attention(layer, x, None, weights=True)
    assert weights is not None
    assert torch.allclose(weights[0, 0], torch.tensor([[1 / 2, 1 / 2], [1 / 3, 2 / 3]]))
    assert plain[0, :, 0].tolist() == pytest.approx([5, 20 / 3])


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("length", [0, 3])
def test_prefix_attention_of_a_real_block_is_that_of_concatenated_tokens(
    qk_norm: bool, length: int
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        layer = build_vit(small(), COLOUR, qk_norm=qk_norm).blocks[1].attn
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
    x, prompts = random_tensor(2, 5, 16), random_tensor(2, length, 16, seed=5)
    given = prompts if length else None
    with torch.no_grad():
        expected, maps = attention_by_hand(layer, x, given)
        found, weights = prefix_attention(layer, x, given, weights=True)
        fused, none = prefix_attention(layer, x, given)
    assert isinstance(layer.q_norm, nn.LayerNorm) is qk_norm
    assert weights is not None
    assert none is None
    assert weights.shape == (2, 2, 5, length + 5)
    assert torch.allclose(weights, maps, atol=1e-5)
    size = expected.abs().max().item()
    assert torch.allclose(found, expected, atol=1e-5 * size)
    assert torch.allclose(fused, found, atol=1e-5 * size)
    if not length:
        with torch.no_grad():
            assert torch.allclose(layer(x), found, atol=1e-5 * size)


def test_gated_and_scaled_attention_is_timms_own_without_prompts() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        layer = Attention(8, num_heads=2, scale_norm=True, gated=True, norm_layer=nn.LayerNorm)
    x = random_tensor(2, 5, 8)
    with torch.no_grad():
        assert torch.allclose(prefix_attention(layer, x, None)[0], layer(x), atol=1e-6)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_patch16_224"])
def test_without_prompts_the_class_token_is_that_of_timm(name: str) -> None:
    found = network(backbone=name, prompt_sets="none").eval()
    mean = {"vit": [0.5] * 3, "deit": [0.485, 0.456, 0.406]}[name.split("_")[0]]
    std = {"vit": [0.5] * 3, "deit": [0.229, 0.224, 0.225]}[name.split("_")[0]]
    inputs = images()
    shown = (inputs / 2 + 0.5 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[
        :, None, None
    ]
    with torch.no_grad():
        expected = found.vit.forward_features(shown)[:, :1]
        assert torch.allclose(found.encode(inputs), expected, atol=1e-5)
        tokens, maps = found.encode_with_rollout(inputs)
    assert torch.allclose(tokens, expected, atol=1e-5)
    assert maps.shape == (4, 16)


def timms_attentions(found: PromptedViT, inputs: Tensor) -> list[Tensor]:
    """Return each layer's attention (batch, heads, tokens, tokens) as timm itself computes it."""
    seen: list[Tensor] = []
    hooks = []
    for block in found.vit.blocks:
        block.attn.fused_attn = False
        hooks.append(
            block.attn.attn_drop.register_forward_hook(lambda _, __, out: seen.append(out))
        )
    with torch.no_grad():
        found.vit.forward_features(inputs)  # this ViT's own scale is -1..1 too
    for hook in hooks:
        hook.remove()
    return seen


def test_the_rollout_is_that_of_timms_attentions() -> None:
    found = network(prompt_sets="none", backbone_width=32).eval()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(2)
        for block in found.vit.blocks:
            block.attn.qkv.weight.normal_()
    seen = timms_attentions(found, images())
    assert [tuple(layer.shape) for layer in seen] == [(4, 2, 17, 17)] * 3
    expected = rollout([layer.mean(dim=1) for layer in seen])
    with torch.no_grad():
        maps = found.encode_with_rollout(images())[1]
    assert torch.allclose(maps, expected, atol=1e-5)
    assert (maps.std(dim=1) > 0.01).all()  # not the same everywhere


def test_registers_are_no_patches_of_a_map() -> None:
    found = network(backbone="vit_small_patch14_reg4_dinov2", prompt_sets="none").eval()
    assert found.vit.num_prefix_tokens == 5
    assert (found.grid_size(), found.map_size(), found.image_size()) == ((4, 4), 16, (16, 16))
    inputs = images()
    mean, std = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    shown = (inputs / 2 + 0.5 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[
        :, None, None
    ]
    seen = timms_attentions(found, shown)
    expected = rollout([layer.mean(dim=1) for layer in seen], prefix_tokens=5)
    with torch.no_grad():
        tokens, maps = found.encode_with_rollout(inputs)
        assert torch.allclose(tokens, found.vit.forward_features(shown)[:, :1], atol=1e-5)
    assert torch.allclose(maps, expected, atol=1e-5)
    assert torch.allclose(maps.sum(dim=1), torch.ones(4), atol=1e-6)


@pytest.mark.parametrize("sets", ["b-t", "g"])
def test_fused_attention_and_the_rollouts_own_give_the_same_tokens(sets: str) -> None:
    found = network(prompt_sets=sets).eval()
    with torch.no_grad():
        for prompts in found.prompts.values():
            prompts.mul_(50)
        tokens, maps = found.encode_with_rollout(images())
        assert torch.allclose(found.encode(images()), tokens, atol=1e-5)
    assert torch.allclose(maps.sum(dim=1), torch.ones(4), atol=1e-6)
    assert (maps >= 0).all()


def test_prompts_change_what_the_class_token_says_in_every_layer() -> None:
    found = network().eval()
    with torch.no_grad():
        before = found.encode(images())
        for name, layer in (("b", 0), ("t", 0), ("t", 1)):
            kept = found.prompts[name].detach().clone()
            found.prompts[name][layer] += 1
            assert not torch.allclose(found.encode(images()), before, atol=1e-3)
            found.prompts[name].copy_(kept)


def test_prompts_are_keys_and_values_per_layer_and_small() -> None:
    shapes = {
        "b-t": {"b": (1, 2, 3, 16), "t": (2, 2, 3, 16)},
        "g": {"g": (3, 2, 3, 16)},
        "none": {},
    }
    for sets, expected in shapes.items():
        prompts = network(prompt_sets=sets).prompts
        assert {name: tuple(prompts[name].shape) for name in prompts} == expected
    large = network(prompt_length=400).prompts["t"]
    assert large.std().item() == pytest.approx(0.02, rel=0.05)
    assert large.mean().item() == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    ("sets", "trained"),
    [
        ("b-t", PROMPTS_AND_HEAD),
        ("g", ["head.1.bias", "head.1.weight", "prompts.g"]),
        ("none", ["head.1.bias", "head.1.weight"]),
    ],
)
def test_gradients_reach_prompts_and_head_and_nothing_else(sets: str, trained: list[str]) -> None:
    found = network(prompt_sets=sets)
    found.train()
    found.loss(images(), torch.arange(4)).backward()  # type: ignore[no-untyped-call]
    reached = {n for n, p in found.named_parameters() if p.grad is not None}
    assert sorted(reached) == trained
    assert sorted(n for n, p in found.named_parameters() if p.requires_grad) == trained
    for name, parameter in found.named_parameters():
        if name in reached:
            assert parameter.grad is not None
            layers = parameter.grad if name.startswith("prompts") else parameter.grad[None]
            assert (layers.flatten(1).abs().sum(dim=1) > 0).all(), name


def test_a_maps_gradient_reaches_the_keys_of_both_prompt_sets() -> None:
    found = network()
    maps = found.encode_with_rollout(images())[1]
    maps.square().sum().backward()  # type: ignore[no-untyped-call]
    for name in ("b", "t"):
        grad = found.prompts[name].grad
        assert grad is not None
        assert grad[:, 0].abs().max().item() > 0
    assert found.head[1].weight.grad is None


def test_training_leaves_the_backbone_in_eval_mode_and_as_it_was() -> None:
    found = network()
    found.train()
    assert found.head.training
    assert not any(part.training for part in found.encoder.modules())
    before = {name: tensor.clone() for name, tensor in found.state_dict().items()}
    optimiser = torch.optim.AdamW(found.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        found.loss(images(), torch.arange(4)).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    changed = {n for n, t in found.state_dict().items() if not torch.equal(t, before[n])}
    assert sorted(changed) == PROMPTS_AND_HEAD


def test_a_trained_backbone_is_in_training_mode_and_all_is_exchanged() -> None:
    found = network(train_backbone=True)
    found.train()
    assert all(part.training for part in found.encoder.modules())
    found.loss(images(), torch.arange(4)).backward()  # type: ignore[no-untyped-call]
    named = dict(found.named_parameters())
    assert set(exchanged_arrays(found)) == set(named)
    of_vit = [name for name in named if name.startswith("encoder.vit.")]
    assert len(of_vit) == len(named) - 4
    assert all(parameter.grad is not None for parameter in named.values())


def test_prompts_and_head_alone_are_exchanged_where_the_backbone_is_frozen() -> None:
    found = network()
    assert list(exchanged_arrays(found)) == PROMPTS_AND_HEAD
    before = found.vit.pos_embed.clone()
    load_exchanged(found, {name: t + 1 for name, t in exchanged_arrays(found).items()})
    assert torch.equal(found.vit.pos_embed, before)
    with refuses(SettingError, "prompts.t"):
        load_exchanged(
            found, {n: t for n, t in exchanged_arrays(found).items() if n != "prompts.t"}
        )


@pytest.mark.parametrize(("sets", "slow"), [("b-t", ["b"]), ("g", ["g"]), ("none", [])])
def test_b_prompts_or_the_one_set_adapt_slowly(sets: str, slow: list[str]) -> None:
    found = network(prompt_sets=sets)
    expected = [found.prompts[name] for name in slow]
    assert [id(parameter) for parameter in found.slow_parameters()] == [id(p) for p in expected]


def test_grey_images_are_scaled_by_the_mean_of_the_three_colours() -> None:
    found = network(GREY, backbone="deit_tiny_patch16_224", prompt_sets="none").eval()
    mean, std = (0.485 + 0.456 + 0.406) / 3, (0.229 + 0.224 + 0.225) / 3
    inputs = images(GREY)
    with torch.no_grad():
        expected = found.vit.forward_features((inputs / 2 + 0.5 - mean) / std)[:, :1]
        assert torch.allclose(found.encode(inputs), expected, atol=1e-5)
        assert found(inputs).shape == (4, 4)
        assert found.encode(inputs).shape == (4, 1, 16)


def test_the_same_seed_gives_the_same_prompts_whatever_the_backbones_weights() -> None:
    without = network(backbone_weights="timm")  # not loaded: it is on the meta device
    assert without.vit.pos_embed.is_meta
    assert not any(tensor.is_meta for tensor in exchanged_arrays(without).values())
    again = network(backbone_weights="timm")
    for name, tensor in exchanged_arrays(without).items():
        assert torch.equal(tensor, exchanged_arrays(again)[name])
    first, second, other = (network(seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.prompts["t"], second.prompts["t"])
    assert torch.equal(first.vit.pos_embed, second.vit.pos_embed)
    assert not torch.equal(first.prompts["t"], other.prompts["t"])


def test_the_vit_is_evidential_unless_the_settings_say_not() -> None:
    found = network()
    assert found.evidence is not None
    assert found.evidence.prior.tolist() == [1] * 4
    plain = network(loss="cross-entropy")
    assert plain.evidence is None
    assert list(exchanged_arrays(plain)) == PROMPTS_AND_HEAD
    inputs, labels = images(), torch.arange(4)
    with torch.no_grad():
        expected = nn.functional.cross_entropy(plain.eval()(inputs), labels)
        assert plain.loss(inputs, labels).item() == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("changes", "task", "said"),
    [
        (
            {"basic_layers": 3},
            COLOUR,
            ["vit.basic-layers", 3],
        ),
        ({"basic_layers": 9}, COLOUR, ["vit.basic-layers", 9, "vit.prompt-sets", "g"]),
        ({"backbone": "resnet18"}, COLOUR, ["backbone", "resnet18"]),
        (
            {"backbone": "vit_base_patch16_siglip_224"},
            COLOUR,
            ["vit_base_patch16_siglip_224"],
        ),
        ({"backbone": "test_vit3"}, COLOUR, ["test_vit3"]),
        ({"backbone": "vit_no_such"}, COLOUR, ["vit_no_such"]),
        ({"backbone_heads": 5}, COLOUR, []),
        ({"backbone_patch": 5}, COLOUR, [5, 16]),
        ({}, NetworkShape((2, 16, 16), 4), ["digits", 2]),
        ({}, NetworkShape((8,), 4), ["vit", "digits"]),
    ],
)
def test_what_cannot_be_prompted_is_refused(
    changes: dict[str, Any], task: NetworkShape, said: list[object]
) -> None:
    with refuses(SettingError, *said):
        network(task, **changes)


def test_one_set_of_prompts_and_none_need_no_basic_layers() -> None:
    for sets in ("g", "none"):
        assert network(prompt_sets=sets, basic_layers=9).map_size() == 16


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"backbone_width": 16}, ["vit.backbone-width", "auto"]),
        ({"backbone_weights": "timm"}, ["backbone-weights"]),
        (
            {"network": "conv", "prompt_length": 3},
            ["vit.prompt-length"],
        ),
        ({"network": "mlp", "prompt_sets": "g"}, ["vit.prompt-sets"]),
        ({"train_backbone": True}, ["vit.train-backbone"]),
        ({"basic_layers": 1}, ["vit.basic-layers"]),
        ({"basic_learning_rate": 1.0}, ["vit.basic-learning-rate"]),
        ({"evidence": "relu"}, ["evidence"]),
        (
            {"network": "vit", "loss": "cross-entropy", "evidence": "relu"},
            ["evidence"],
        ),
    ],
)
def test_settings_that_mean_nothing_to_the_network_are_refused(
    values: dict[str, Any], said: list[object]
) -> None:
    with refuses(SettingError, *said):
        check_network_settings(CommonSettings(**values))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {**SMALL, "evidence": "relu"},
        {"network": "conv", "loss": "evidential", "evidence": "relu"},
        {"network": "vit", "loss": "cross-entropy"},
    ],
)
def test_settings_that_mean_something_to_the_network_are_taken(values: dict[str, Any]) -> None:
    check_network_settings(CommonSettings(**values))
