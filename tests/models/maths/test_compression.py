import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.models.maths.compression import Floats, from_bf16, to_bf16

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
