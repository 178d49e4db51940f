"""Gaussian noise: of a generator that can be repeated, or of the operating system, that cannot."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor


def normals(
    shape: torch.Size, rng: torch.Generator | None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return standard normals of ``shape``, on the CPU.

    Torch's generator has 2³² seeds, and its outputs give its state away: without ``rng`` they are
    made of the operating system's random bytes (Box and Muller 1958), so that nobody, not even one
    who knows some of them, can draw the others again.
    """
    if rng is not None:
        return torch.randn(shape, generator=rng, dtype=dtype)
    count = shape.numel()
    if not count:
        return torch.zeros(shape, dtype=dtype)
    words = torch.frombuffer(bytearray(os.urandom(16 * count)), dtype=torch.int64)
    uniform = (words >> 11 & (2**53 - 1)).double() * 2.0**-53  # [0, 1) in steps of 2⁻⁵³
    radius = torch.sqrt(-2 * torch.log1p(-uniform[:count]))
    return (radius * torch.cos(2 * math.pi * uniform[count:])).reshape(shape).to(dtype)
