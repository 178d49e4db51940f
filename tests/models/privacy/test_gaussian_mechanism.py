import math

import pytest
import torch

from fedsilo.core.errors import SiteError
from fedsilo.models.privacy.gaussian_mechanism import clip_to_norm, normals, uniforms
from tests.support.errors import refuses


def test_clipped_to_shortens_all_arrays_as_one_vector() -> None:
    clipped = clip_to_norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])}, 1.0)
    assert clipped["a"].tolist() == pytest.approx([0.6])
    assert clipped["b"].tolist() == [pytest.approx([0.8])]


def test_clipped_to_leaves_what_is_short_enough() -> None:
    assert clip_to_norm({"a": torch.tensor([3.0, 4.0])}, 5.0)["a"].tolist() == [3.0, 4.0]


def test_clipped_to_refuses_values_that_are_not_finite() -> None:
    with refuses(SiteError, "train.learning-rate"):
        clip_to_norm({"a": torch.tensor([1.0, math.nan])}, 1.0)


@pytest.mark.parametrize("shape", [(3, 2), (0,), (5,)])
def test_numbers_of_the_system_are_normal_and_not_those_of_a_generator(
    shape: tuple[int, ...],
) -> None:
    size = torch.Size(shape)
    drawn = normals(size, None, torch.float32)
    assert (drawn.shape, drawn.dtype) == (size, torch.float32)
    assert drawn.isfinite().all()
    if drawn.numel():
        assert not torch.equal(drawn, normals(size, None, torch.float32))
    many = normals(torch.Size([20_000]), None, torch.float64)
    # Each is off by more than five of its standard errors once in two million times
    assert abs(many.mean().item()) < 5 / math.sqrt(20_000)
    assert abs(many.square().mean().item() - 1) < 5 * math.sqrt(2 / 20_000)


def test_numbers_of_a_generator_are_repeated() -> None:
    def draw() -> torch.Tensor:
        return normals(torch.Size([4]), torch.Generator().manual_seed(3), torch.float64)

    assert torch.equal(draw(), draw())


def test_uniform_numbers_of_the_system_have_53_bits() -> None:
    numbers = uniforms(1000, None)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert torch.equal(numbers, (numbers * 2**53).round() / 2**53)
    assert uniforms(0, None).shape == (0,)
