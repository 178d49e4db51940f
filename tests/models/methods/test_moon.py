import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedsilo.models.contract.errors import SettingError
from fedsilo.models.contract.seeding import seed_generators
from fedsilo.models.contract.settings_schema import build
from fedsilo.models.methods.moon import MoonSettings, Projection, build_projection, contrastive_loss

EAST, NORTH, WEST = (
    torch.tensor([[1.0, 0.0], [0.0, 1.0], [-2.0, 0.0]])[i : i + 1] for i in (0, 1, 2)
)


def loss_of(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float = 0.5) -> float:
    return contrastive_loss(z, z_global, z_previous, temperature).item()


def test_the_loss_by_hand() -> None:
    # similarities 1 and 0, over 0.5: -log(e^2 / (e^2 + 1))
    assert loss_of(EAST, EAST, NORTH) == pytest.approx(math.log(1 + math.exp(-2)))
    # 0 and 1
    assert loss_of(EAST, NORTH, EAST) == pytest.approx(math.log(1 + math.exp(2)))
    # 1 and -1, over 1
    assert loss_of(EAST, EAST, WEST, 1.0) == pytest.approx(math.log(1 + math.exp(-2)))


def test_a_batch_has_the_mean_of_its_samples_losses() -> None:
    z = torch.cat([EAST, EAST])
    found = loss_of(z, torch.cat([EAST, NORTH]), torch.cat([NORTH, EAST]))
    each = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))]
    assert found == pytest.approx(sum(each) / 2)


@given(st.integers(0, 1000), st.floats(0.1, 3.0))
def test_it_is_the_papers_formula_and_the_length_of_a_representation_counts_for_nothing(
    seed: int, temperature: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    z, near, far = torch.randn(3, 4, 5, generator=draw).double()

    def cosine(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(dim=1) / (a.norm(dim=1) * b.norm(dim=1))

    positive, negative = (torch.exp(cosine(z, other) / temperature) for other in (near, far))
    expected = -(positive / (positive + negative)).log().mean().item()
    assert loss_of(z, near, far, temperature) == pytest.approx(expected, rel=1e-4)
    assert loss_of(3 * z, near / 2, 5 * far, temperature) == pytest.approx(expected, rel=1e-4)


def test_with_the_same_model_on_both_sides_it_is_a_constant_without_a_gradient() -> None:
    z = torch.tensor([[1.0, 2.0], [0.5, -1.0]], requires_grad=True)
    found = contrastive_loss(z, NORTH.expand(2, 2), NORTH.expand(2, 2), 0.5)
    found.backward()  # type: ignore[no-untyped-call]
    assert found.item() == pytest.approx(math.log(2))
    assert z.grad is not None
    assert not z.grad.any()


def test_a_step_down_the_gradient_turns_to_the_global_and_from_the_previous_representation() -> (
    None
):
    z = torch.tensor([[1.0, 1.0]], requires_grad=True)
    contrastive_loss(z, EAST, NORTH, 0.5).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert z.grad[0, 0] < 0 < z.grad[0, 1]


def test_it_is_computed_in_single_precision_whatever_comes() -> None:
    found = contrastive_loss(EAST.bfloat16(), EAST.bfloat16(), NORTH.bfloat16(), 0.5)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(math.log(1 + math.exp(-2)))


def test_the_head_projects_the_mean_of_the_tokens_through_two_layers() -> None:
    head = Projection(channels=2, size=3)
    first, last = head.layers[0], head.layers[2]
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
        first.bias.zero_()
        last.weight.copy_(torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 1.0]]))
        last.bias.copy_(torch.tensor([0.0, 0.0, 5.0]))
    tokens = torch.tensor([[[1.0, 4.0], [3.0, -2.0]]])  # mean (2, 1), then (2, 0)
    assert head(tokens).tolist() == [[2.0, 4.0, 5.0]]


def test_the_head_is_the_seeds_and_leaves_other_draws_alone() -> None:
    with seed_generators(3, "elsewhere"):
        expected = torch.rand(2)
    with seed_generators(3, "elsewhere"):
        first = build_projection(7, 4)
        assert torch.equal(torch.rand(2), expected)
    again, other = build_projection(7, 4), build_projection(8, 4)
    shapes = {name: tuple(array.shape) for name, array in first.state_dict().items()}
    assert shapes == {
        "layers.0.weight": (4, 4),
        "layers.0.bias": (4,),
        "layers.2.weight": (256, 4),
        "layers.2.bias": (256,),
    }
    for name, array in first.state_dict().items():
        assert torch.equal(array, again.state_dict()[name])
        assert not torch.equal(array, other.state_dict()[name])


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("moon.contrast-mu", 0.0, "above 0"),
        ("moon.contrast-mu", -1, "above 0"),
        ("moon.contrast-temperature", 0.0, "above 0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(key: str, value: float, allowed: str) -> None:
    with pytest.raises(SettingError, match=rf"'{key}' must be {allowed}"):
        build(MoonSettings, {key: value})


def test_the_papers_values_hold_unless_they_are_set() -> None:
    assert build(MoonSettings, {}) == MoonSettings(5.0, 0.5)
