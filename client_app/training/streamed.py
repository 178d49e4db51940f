"""Stream a tensor that is too large for the device to it, batch by batch."""

import torch
from torch import Tensor

_BUFFERS = 2  # one is filled while the other is copied


class Streamed:
    """A tensor that is too large for the device; its batches are copied from two pinned buffers.

    Pinning costs as much as a copy, so it is done once per buffer instead of once per batch. A
    buffer is filled again only after its earlier content has arrived.
    """

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self._tensor = tensor
        self._device = device
        self._buffers: list[Tensor] = []
        self._arrived: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._turn = 0

    def pick(self, rows: Tensor) -> Tensor:
        """Return the given rows (n,) on the device, images in channels_last."""
        turn = self._turn = (self._turn + 1) % _BUFFERS
        if not self._buffers or len(rows) > len(self._buffers[0]):
            self._wait(*range(_BUFFERS))
            self._buffers = [self._buffer(len(rows)) for _ in range(_BUFFERS)]
        self._wait(turn)
        batch = self._buffers[turn][: len(rows)]
        batch.copy_(self._tensor[rows])
        moved = batch.to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._arrived[turn] = event
        if moved.data_ptr() == batch.data_ptr():  # on the CPU nothing was copied
            return moved.clone()
        return moved

    def _buffer(self, rows: int) -> Tensor:
        shape = (rows, *self._tensor.shape[1:])
        layout = torch.contiguous_format
        if len(shape) == 4:  # images
            layout = torch.channels_last
        pinned = self._device.type == "cuda"
        kind = self._tensor.dtype
        return torch.empty(shape, dtype=kind, pin_memory=pinned, memory_format=layout)

    def _wait(self, *turns: int) -> None:
        for turn in turns:
            event = self._arrived[turn]
            if event:
                event.synchronize()
