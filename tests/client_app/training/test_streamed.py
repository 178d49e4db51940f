"""Batches of a held tensor: the rows that were asked for, and buffers that are used again."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.client_app.training.compute import Compute
from fedsilo.client_app.training.streamed import Streamed

CPU = torch.device("cpu")


@given(
    shape=st.sampled_from([(40,), (40, 3), (40, 2, 4, 5)]),
    batches=st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=12), max_size=8),
)
def test_a_streamed_tensor_gives_the_rows_that_were_asked_for(
    shape: tuple[int, ...], batches: list[list[int]]
) -> None:
    tensor = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    streamed = Streamed(tensor, CPU)
    taken = [(streamed.pick(torch.tensor(rows)), rows) for rows in batches]
    for batch, rows in taken:  # none was written over by a later one
        assert torch.equal(batch, tensor[rows])


def test_images_are_streamed_channels_last_from_two_buffers_at_most() -> None:
    tensor = torch.rand(20, 3, 4, 4)
    streamed = Streamed(tensor, CPU)
    for size in (4, 8, 8, 2):
        batch = streamed.pick(torch.arange(size))
        assert batch.is_contiguous(memory_format=torch.channels_last)
    assert [len(buffer) for buffer in streamed._buffers] == [8, 8]


def test_on_the_cpu_rows_of_a_tensor_are_picked_from_it() -> None:
    tensor = torch.rand(5, 2)
    pick = Compute(CPU, bf16=False).hold(tensor)
    assert torch.equal(pick(torch.tensor([3, 0])), tensor[[3, 0]])
