"""Gaussian noise, repeatable from a generator or secret from the operating system."""

import math
import os

import torch
from torch import Tensor


def normals(
    shape: torch.Size, rng: torch.Generator | None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return standard normals of ``shape``, on the CPU; without ``rng`` nobody can repeat them."""
    if rng is not None:
        return torch.randn(shape, generator=rng, dtype=dtype)
    count = shape.numel()
    if not count:
        return torch.zeros(shape, dtype=dtype)
    # Box and Muller 1958
    uniform = uniforms(2 * count, None)
    radius = torch.sqrt(-2 * torch.log1p(-uniform[:count]))
    return (radius * torch.cos(2 * math.pi * uniform[count:])).reshape(shape).to(dtype)


def uniforms(count: int, rng: torch.Generator | None) -> Tensor:
    """Return numbers (count,) in [0, 1), float64; without ``rng`` nobody can repeat them."""
    if rng is not None:
        return torch.rand(count, generator=rng, dtype=torch.float64)
    if not count:
        return torch.zeros(0, dtype=torch.float64)
    # What protects must be cryptographic: torch's generator has 2^32 seeds, and its state follows
    # from a few of its outputs. Hence random bytes of the system
    words = torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64)
    return (words >> 11 & (2**53 - 1)).double() * 2.0**-53  # in steps of 2⁻⁵³
