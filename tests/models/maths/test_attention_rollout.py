"""Rollout and its distillation by hand, and against the long way round."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsilo.models.maths.attention_rollout import (
    BufferMoments,
    buffer_moments,
    distillation_loss,
    head_mean_without_prefix,
    rollout,
    scaled_maps,
    upsampling_gram,
)

GRID, SIZE = (14, 14), (224, 224)
CELLS = 14 * 14
SEEDS = st.integers(0, 10**6)
GRAM = upsampling_gram(GRID, SIZE)


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def attention(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw, dtype=torch.float64).mul(2).softmax(dim=-1)


def random_maps(draw: torch.Generator, count: int, cells: int = CELLS) -> Tensor:
    """Return maps that sum to 1, float64."""
    raw = torch.rand(count, cells, generator=draw, dtype=torch.float64)
    return raw / raw.sum(dim=1, keepdim=True)


def products(attentions: list[Tensor]) -> Tensor:
    """Return the product of (A + I) / 2 over layers, later ones on the left, (batch, n, n)."""
    identity = torch.eye(attentions[0].shape[-1], dtype=attentions[0].dtype)
    joint = identity.expand_as(attentions[0])
    for layer in attentions:
        joint = ((layer + identity) / 2) @ joint
    return joint


def upsampled(maps: Tensor) -> Tensor:
    images = maps.reshape(-1, 1, *GRID)
    return torch.nn.functional.interpolate(
        images, size=SIZE, mode="bilinear", align_corners=False
    ).flatten(1)


def distances_in_loops(
    maps: Tensor, labels: Tensor, buffer: dict[int, Tensor], per_site: int
) -> Tensor:
    """Return the batch mean of eq. 7 as it stands: a sum over the class's maps, divided by M."""
    totals = []
    for own, label in zip(maps, labels.tolist(), strict=True):
        total = own.sum() * 0
        for other in buffer.get(label, torch.zeros(0, CELLS)):
            total = total + (upsampled(own[None]) - upsampled(other[None])).square().sum()
        totals.append(total / per_site)
    return torch.stack(totals).mean()


def test_heads_are_averaged_and_the_prefix_dropped_by_hand() -> None:
    first, second = [[0.5, 0.3, 0.2], [0.0, 1.0, 0.0]], [[0.1, 0.6, 0.3], [0.5, 0.0, 0.5]]
    found = head_mean_without_prefix(torch.tensor([[first, second]]), prefix=1)
    # means (0.3, 0.45, 0.25) and (0.25, 0.5, 0.25); without their first 0.7 and 0.75 are left
    expected = torch.tensor([[[0.45 / 0.7, 0.25 / 0.7], [0.5 / 0.75, 0.25 / 0.75]]])
    assert torch.allclose(found, expected, atol=1e-6)
    both = head_mean_without_prefix(torch.tensor([[first, second]]), prefix=0)
    assert torch.allclose(both[0, 0], torch.tensor([0.3, 0.45, 0.25]), atol=1e-6)


def test_two_layers_of_three_tokens_by_hand() -> None:
    first = torch.tensor([[[0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.0, 0.5, 0.5]]])
    second = torch.tensor([[[0.2, 0.4, 0.4], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]]])
    # (A + I) / 2: the second's first row is (0.6, 0.2, 0.2), the first's rows are
    # (0.75, 0.15, 0.1), (0.1, 0.8, 0.1) and (0, 0.25, 0.75): together (0.47, 0.30, 0.23)
    found = rollout([first, second])
    assert found[0].tolist() == pytest.approx([0.30 / 0.53, 0.23 / 0.53])


def test_of_one_layer_of_two_tokens_all_attention_is_on_the_one_patch() -> None:
    layer = torch.tensor([[[0.9, 0.1], [0.5, 0.5]]])
    assert products([layer])[0].tolist() == [
        pytest.approx([0.95, 0.05]),
        pytest.approx([0.25, 0.75]),
    ]
    assert rollout([layer]).tolist() == [[1.0]]


@given(SEEDS, st.integers(1, 5), st.integers(1, 2))
def test_rollout_row_by_row_equals_the_matrix_product(
    seed: int, layers: int, prefix_tokens: int
) -> None:
    draw = drawn(seed)
    attentions = [attention(draw, 2, 3, 6, 4 + 6) for _ in range(layers)]  # 4 prompts, 6 tokens
    kept = []
    for layer in attentions:
        mean = sum(layer[:, head] for head in range(3)) / 3
        rows = mean[:, :, 4:]
        kept.append(rows / rows.sum(dim=2, keepdim=True))
    row = products(kept)[:, 0, prefix_tokens:]
    found = rollout([head_mean_without_prefix(layer, 4) for layer in attentions], prefix_tokens)
    assert found.shape == (2, 6 - prefix_tokens)
    assert torch.allclose(found, row / row.sum(dim=1, keepdim=True), atol=1e-12)
    assert torch.allclose(found.sum(dim=1), torch.ones(2, dtype=torch.float64), atol=1e-12)


@given(SEEDS)
def test_rows_of_a_product_sum_to_one(seed: int) -> None:
    draw = drawn(seed)
    joint = products([attention(draw, 2, 5, 5) for _ in range(4)])
    assert torch.allclose(joint.sum(dim=2), torch.ones(2, 5, dtype=torch.float64), atol=1e-12)
    single = rollout([attention(draw, 2, 5, 5).float() for _ in range(4)])
    assert torch.allclose(single.sum(dim=1), torch.ones(2), atol=1e-6)


@given(SEEDS, st.integers(0, 3))
def test_layers_of_identity_attention_change_nothing(seed: int, where: int) -> None:
    draw = drawn(seed)
    identity = torch.eye(5, dtype=torch.float64).expand(2, 5, 5)
    assert torch.equal(products([identity] * 4), identity)
    others = [attention(draw, 2, 5, 5) for _ in range(3)]
    among = [*others[:where], identity, *others[where:]]
    assert torch.allclose(rollout(among), rollout(others), atol=1e-12)


def test_the_order_of_layers_counts() -> None:
    draw = drawn(2)
    attentions = [attention(draw, 1, 5, 5) for _ in range(2)]
    assert not torch.allclose(rollout(attentions), rollout(attentions[::-1]), atol=1e-4)


def test_register_tokens_are_walked_through_and_are_no_patches() -> None:
    # the class token sees only the register, the register in the layer before only patch 2
    onto_patch = torch.tensor([[[1.0, 0, 0, 0], [0, 0, 0, 1.0], [0, 0, 1.0, 0], [0, 0, 0, 1.0]]])
    onto_register = torch.tensor(
        [[[0.0, 1.0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0], [0, 0, 0, 1.0]]]
    )
    found = rollout([onto_patch, onto_register], prefix_tokens=2)
    assert found[0].tolist() == pytest.approx([0.0, 1.0], abs=1e-9)
    # as a patch the register itself has (1/2)(1/2) and the patch behind it as much
    found = rollout([onto_patch, onto_register], prefix_tokens=1)
    assert found[0].tolist() == pytest.approx([0.5, 0.0, 0.5], abs=1e-9)


def test_the_gram_matrix_of_a_doubled_row_by_hand() -> None:
    # one row of two cells on four pixels: weights (1, 0), (3/4, 1/4), (1/4, 3/4), (0, 1)
    found = upsampling_gram((1, 2), (1, 4))
    assert found.tolist() == [[1.625, 0.375], [0.375, 1.625]]
    assert found.dtype == torch.float64


def test_a_map_of_the_images_own_size_is_compared_as_it_is() -> None:
    assert torch.equal(upsampling_gram((3, 2), (3, 2)), torch.eye(6, dtype=torch.float64))


@given(SEEDS)
@settings(max_examples=25, deadline=None)
def test_the_gram_matrix_gives_the_distance_of_upsampled_maps(seed: int) -> None:
    first, second = random_maps(drawn(seed), 2)
    expected = (upsampled(first[None]) - upsampled(second[None])).square().sum().item()
    away = first - second
    assert (away @ GRAM @ away).item() == pytest.approx(expected, rel=1e-10)
    single = buffer_moments({0: second[None]}, 1, GRAM).to(torch.device("cpu"))
    found = distillation_loss(first[None], torch.tensor([0]), single, 1)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected, rel=1e-5)


def moments_of(buffer: dict[int, Tensor], classes: int = 3) -> BufferMoments:
    return buffer_moments(buffer, classes, GRAM).to(torch.device("cpu"))


@given(SEEDS, st.integers(1, 5))
@settings(max_examples=10, deadline=None)
def test_the_closed_form_is_the_sum_over_the_buffer(seed: int, per_site: int) -> None:
    draw = drawn(seed)
    buffer = {0: random_maps(draw, 7), 2: random_maps(draw, 1)}
    maps, labels = random_maps(draw, 4), torch.tensor([0, 2, 0, 1])
    looped = maps.clone().requires_grad_()
    expected = distances_in_loops(looped, labels, buffer, per_site)
    expected.backward()  # type: ignore[no-untyped-call]
    closed = maps.float().requires_grad_()
    found = distillation_loss(closed, labels, moments_of(buffer), per_site)
    found.backward()  # type: ignore[no-untyped-call]
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert looped.grad is not None
    assert closed.grad is not None
    largest = looped.grad.abs().max().item()
    assert torch.allclose(closed.grad.double(), looped.grad, atol=1e-5 * largest)


def test_only_maps_of_a_samples_own_class_count() -> None:
    draw = drawn(5)
    near, far = random_maps(draw, 2), random_maps(draw, 3) ** 3
    moments = moments_of({0: near, 1: far / far.sum(dim=1, keepdim=True)})
    losses = [distillation_loss(near[:1], torch.tensor([c]), moments, 1).item() for c in range(3)]
    assert losses[0] < losses[1]
    assert losses[2] == 0


def test_classes_without_maps_add_nothing_and_have_no_gradient() -> None:
    draw = drawn(6)
    moments = moments_of({1: random_maps(draw, 2), 2: torch.zeros(0, CELLS)})
    maps = random_maps(draw, 3).float().requires_grad_()
    loss = distillation_loss(maps, torch.tensor([0, 1, 2]), moments, 2)
    alone = distillation_loss(maps[1:2].detach(), torch.tensor([1]), moments, 2)
    assert loss.item() == pytest.approx(alone.item() / 3)
    loss.backward()  # type: ignore[no-untyped-call]
    assert maps.grad is not None
    assert (maps.grad[[0, 2]] == 0).all()
    assert (maps.grad[1] != 0).any()


def test_a_map_that_is_all_there_is_in_the_buffer_is_at_no_distance() -> None:
    map_ = random_maps(drawn(7), 1)
    loss = distillation_loss(map_.float(), torch.tensor([0]), moments_of({0: map_}), 1)
    assert loss.item() == pytest.approx(0, abs=1e-6)


def test_moments_count_average_and_spread_the_maps_of_each_class() -> None:
    maps = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    gram = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    found = buffer_moments({1: maps[:2], 0: maps[2:], 2: maps[:0]}, 4, gram)
    assert found.counts.tolist() == [1, 2, 0, 0]
    assert found.means.tolist() == [[0.5, 0.5], [0.5, 0.5], [0, 0], [0, 0]]
    assert found.spreads.tolist() == [0, 0.75, 0, 0]  # 2.5 - 1.75: (2 + 3) / 2, (2 + 2 + 3) / 4
    assert found.means.dtype == torch.float64


def test_a_row_whose_attention_is_all_on_the_prompts_becomes_uniform_not_nan() -> None:
    attention = torch.tensor([[[[1.0, 0.0, 0.0], [0.0, 0.25, 0.75]]]])  # one prompt column
    found = head_mean_without_prefix(attention, 1)
    assert found.tolist() == [[[0.5, 0.5], [0.25, 0.75]]]


@pytest.mark.parametrize("variation", [1.0, 0.1, 0.01])
def test_autocast_changes_neither_a_rollout_nor_its_distance(variation: float) -> None:
    draw = drawn(3)
    attentions = [random_attention(draw, variation) for _ in range(3)]
    maps = random_maps(draw, 6)
    near = (1 - variation) / maps.shape[1] + variation * maps
    moments = moments_of({0: near[1:]})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rolled = rollout(attentions)
        loss = distillation_loss(near[:1].float(), torch.tensor([0]), moments, 5)
    assert torch.equal(rolled, rollout(attentions))
    exact = distillation_loss(near[:1].double(), torch.tensor([0]), moments, 5)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-3)


def random_attention(draw: torch.Generator, variation: float) -> Tensor:
    return (variation * torch.randn(1, 17, 17, generator=draw)).softmax(dim=-1)


def test_maps_by_their_maximum_by_hand() -> None:
    maps = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]])
    assert scaled_maps(maps, "max").tolist() == [[1.0, 0.5, 0.5], [0.0, 1.0, 0.0]]
    assert scaled_maps(maps, "sum") is maps
    even = torch.full((2, 64), 1 / 64)
    assert torch.equal(scaled_maps(even, "max"), torch.ones(2, 64))


def test_distillation_of_maps_by_their_maximum_is_larger_by_the_square_of_the_scale() -> None:
    """Two cells, no upsampling: one map [.75 .25] against [.5 .5], by hand .125 and 4/9."""
    own, other = torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]])
    found = {}
    for scale in ("sum", "max"):
        moments = buffer_moments({0: scaled_maps(other, scale)}, 1, torch.eye(2).double()).to(
            own.device
        )
        found[scale] = distillation_loss(
            scaled_maps(own, scale), torch.tensor([0]), moments, 1
        ).item()
    assert found == {"sum": pytest.approx(0.125), "max": pytest.approx(4 / 9)}


def test_dropped_prompt_columns_leave_rows_that_sum_to_what_the_tokens_got() -> None:
    layer = torch.tensor([[[[0.5, 0.25, 0.25], [0.2, 0.4, 0.4]]]])  # one prompt, two tokens
    kept = head_mean_without_prefix(layer, 1, renormalise=False)
    assert kept.tolist() == [[[0.25, 0.25], [pytest.approx(0.4), pytest.approx(0.4)]]]
    assert rollout([kept]).tolist() == [[1.0]]


def test_a_layers_attention_to_prompts_moves_a_map_that_drops_it_and_no_renormalised_one() -> None:
    """Class token and two patches; a share of the last layer's class row is on a prompt.

    The rest x = 0.6 of that row is (1/3, 1/6, 1/2) x. Before it the class token has (1/2, 1/2, 0)
    and patches themselves. By hand: dropped (1 + x, 2 x) / (1 + 3 x), which x moves by
    -2 / (1 + 3 x)^2; renormalised (1/2, 1/2) for every x.
    """
    own = torch.eye(3, dtype=torch.float64)
    first = torch.cat([torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64), own[1:]])
    for renormalise, expected, slope in ((False, 4 / 7, -2 / 2.8**2), (True, 1 / 2, 0.0)):
        x = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
        parts = x * torch.tensor([1 / 3, 1 / 6, 1 / 2], dtype=torch.float64)
        rows = torch.cat([torch.cat([(1 - x)[None], parts])[None], torch.eye(3, 4).double()[1:]])
        last = head_mean_without_prefix(rows[None, None], 1, renormalise)
        found = rollout([first[None], last])[0]
        assert found.tolist() == pytest.approx([expected, 1 - expected])
        found[0].backward()
        assert x.grad is not None
        assert x.grad.item() == pytest.approx(slope, abs=1e-9)


def test_byte_maps_have_the_maximum_255() -> None:
    maps = torch.tensor([[0.5, 0.25, 0.25]])
    assert scaled_maps(maps, "byte").tolist() == [[255.0, 127.5, 127.5]]
