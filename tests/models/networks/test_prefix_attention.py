"""Attention is fused where no map is needed; maps apart from it equal those of the attention."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.models.maths.attention_rollout import attention_weights, mean_attention
from fedsilo.models.networks.build import build_classifier
from fedsilo.models.networks.kinds import NetworkShape
from fedsilo.models.networks.prefix_attention import fused_prefix_attention, prefix_attention
from fedsilo.models.networks.prompted_vit import PromptedViT
from tests.support.tiny import VIT_FIELDS

DEPTH, HEADS, TOKENS, PROMPTS = 3, 2, 17, 3


def network(**changes: Any) -> PromptedViT:
    fields = VIT_FIELDS | {"dataset": "digits", "backbone_depth": DEPTH} | changes
    with torch.random.fork_rng():
        torch.manual_seed(1)
        built = build_classifier(CommonSettings(**fields), NetworkShape((3, 16, 16), 4))
        for prompts in cast(PromptedViT, built).prompts.values():
            nn.init.normal_(prompts)
    return cast(PromptedViT, built).eval()  # without dropout


def images() -> Tensor:
    return torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1


def gradients(found: PromptedViT, fuses: bool) -> dict[str, Tensor]:
    """Return the gradients of a loss of class token and maps, by trained parameter."""
    found.fuses_maps = fuses
    found.zero_grad()
    tokens, maps = found.encode_with_rollout(images())
    loss = found.classify(tokens).square().mean() + 100 * maps.square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return {n: p.grad.clone() for n, p in found.named_parameters() if p.grad is not None}


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an entry for each call of PyTorch's fused attention."""
    calls, fused = list[int](), nn.functional.scaled_dot_product_attention

    def counted(*arguments: Any, **named: Any) -> Tensor:
        calls.append(1)
        return fused(*arguments, **named)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", counted)
    return calls


def test_every_layer_is_fused_where_no_map_is_needed(fused_calls: list[int]) -> None:
    found = network()
    found.loss(images(), torch.arange(4))
    assert len(fused_calls) == DEPTH
    found.encode_with_map(images())
    assert len(fused_calls) == 2 * DEPTH


@pytest.mark.parametrize(("fuses", "layers"), [(None, 0), (False, 0), (True, DEPTH)])
def test_maps_of_a_cpu_keep_their_bits_unless_they_are_to_be_apart(
    fuses: bool | None, layers: int, fused_calls: list[int]
) -> None:
    found = network()
    found.fuses_maps = fuses
    found.encode_with_rollout(images())
    assert len(fused_calls) == layers


@pytest.mark.parametrize("sets", ["b-t", "g", "none"])
def test_maps_apart_have_the_same_tokens_maps_and_gradients(sets: str) -> None:
    found = network(prompt_sets=sets)
    with torch.no_grad():
        tokens, maps = found.encode_with_rollout(images())
        found.fuses_maps = True
        others, apart = found.encode_with_rollout(images())
    assert torch.allclose(others, tokens, atol=1e-5)
    assert torch.allclose(apart, maps, atol=1e-6)
    expected, close = gradients(found, fuses=False), gradients(found, fuses=True)
    assert close.keys() == expected.keys()
    assert not [name for name in close if name.startswith("encoder.")], "the backbone is frozen"
    for name, gradient in expected.items():
        assert torch.allclose(close[name], gradient, rtol=1e-3, atol=1e-5), name


def test_maps_apart_agree_in_bf16() -> None:
    found = network()
    maps = []
    for fuses in (False, True):
        found.fuses_maps = fuses
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            maps.append(found.encode_with_rollout(images())[1])
    assert torch.allclose(maps[1], maps[0], atol=2e-3)


def test_the_mean_attention_has_the_gradient_of_its_formula() -> None:
    rng = torch.Generator().manual_seed(2)
    q = torch.randn(2, HEADS, 4, 3, generator=rng).requires_grad_()
    k = torch.randn(2, HEADS, 6, 3, generator=rng).requires_grad_()
    weights = torch.randn(2, 4, 6, generator=rng)
    formula = (attention_weights(q, k).mean(dim=1) * weights).sum()
    expected = torch.autograd.grad(formula, (q, k))
    found = torch.autograd.grad((mean_attention(q, k) * weights).sum(), (q, k))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(("attend", "kept"), [(prefix_attention, 1), (fused_prefix_attention, 0)])
def test_attention_of_the_heads_is_kept_for_the_gradient_only_without_fusing(
    attend: Any, kept: int
) -> None:
    block = network().vit.blocks[0]
    prompts = torch.randn(2, PROMPTS, 16).requires_grad_()
    shapes = []
    more = (True,) if attend is prefix_attention else ()

    def note(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape[-2:]))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        attend(block.attn, torch.randn(2, TOKENS, 16), prompts, *more)
    assert (shapes.count((TOKENS, PROMPTS + TOKENS)) >= 1) == bool(kept)
