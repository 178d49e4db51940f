import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.models.maths.compression import (
    Floats,
    from_bf16,
    from_int8,
    largest,
    to_bf16,
    to_int8,
)

numbers = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50)


def floats(*values: float) -> Floats:
    return np.array(values, np.float32)


def test_bf16_of_hand_made_numbers_is_the_nearest_and_of_two_the_even_one() -> None:
    """Between 1 and 2 bfloat16 has steps of 1/128."""
    values = floats(1.0, -2.5, 0.0, 1 + 3 / 512, 1 + 1 / 256, 1 + 3 / 256)
    assert from_bf16(to_bf16(values)).tolist() == [1.0, -2.5, 0.0, 1 + 1 / 128, 1.0, 1 + 2 / 128]


@given(numbers)
def test_bf16_of_any_numbers_is_pytorchs(values: list[float]) -> None:
    own = from_bf16(to_bf16(floats(*values)))
    assert own.tolist() == torch.tensor(values).bfloat16().float().tolist()


def test_int8_of_hand_made_numbers_has_the_largest_as_127_and_rounds_by_chance() -> None:
    """The scale is 1.27 / 127 = 0.01: 0.254 is 25.4 steps, -0.003 is -0.3 steps."""
    values = floats(1.27, 0.254, -0.003, 0.0)
    scale, down = to_int8(values, floats(0.5, 0.5, 0.2, 0.999))
    assert scale == pytest.approx(0.01)
    assert down.tolist() == [127, 25, -1, 0]
    _, up = to_int8(values, floats(0.0, 0.7, 0.4, 0.0))
    assert up.tolist() == [127, 26, 0, 0]
    assert from_int8(scale, up).tolist() == pytest.approx([1.27, 0.26, 0.0, 0.0])


def test_int8_of_many_roundings_is_the_number_on_average() -> None:
    values = np.full(40_000, 0.254, np.float32)
    values[0] = 1.27
    scale, steps = to_int8(values, torch.rand(40_000, generator=torch.manual_seed(1)).numpy())
    assert from_int8(scale, steps)[1:].mean() == pytest.approx(0.254, abs=1e-4)


@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-45])
def test_int8_of_numbers_without_a_scale_is_zero(value: float) -> None:
    scale, steps = to_int8(floats(value, 0.0), floats(0.5, 0.5))
    assert from_int8(scale, steps).tolist() == [0.0, 0.0]


@given(numbers)
def test_int8_is_never_more_than_a_step_off(values: list[float]) -> None:
    given_ = floats(*values)
    uniform = torch.rand(len(values), generator=torch.manual_seed(3)).numpy()
    scale, steps = to_int8(given_, uniform)
    assert np.abs(from_int8(scale, steps) - given_).max() <= scale * 1.001 + 1e-30


def test_largest_of_hand_made_numbers_are_those_furthest_from_zero() -> None:
    chosen = largest(floats(0.1, -3.0, 2.0, 0.0, -2.0), 2)
    assert chosen.tolist() == [False, True, True, False, False]


def test_largest_of_equal_numbers_are_the_first() -> None:
    assert largest(floats(1.0, -1.0, 1.0, 1.0), 3).tolist() == [True, True, True, False]


@given(numbers, st.integers(1, 50))
def test_largest_are_so_many_and_none_left_out_is_larger(values: list[float], count: int) -> None:
    given_, count = floats(*values), min(count, len(values))
    chosen = largest(given_, count)
    assert chosen.sum() == count
    assert np.abs(given_[~chosen]).max(initial=0) <= np.abs(given_[chosen]).min()
