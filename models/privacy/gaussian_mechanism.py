"""Arrays clipped as one vector, and random numbers in floating point.

What is private per patient does not leave by these: ``fedsilo.models.privacy.release`` has whole
numbers for it.
"""

import math
import os
from collections.abc import Mapping

import torch
from torch import Tensor

from fedsilo.models.contract.errors import SiteError


def finite(value: Tensor) -> Tensor:
    """Copy an array as float64 on the CPU, with 0 in place of what is not finite.

    By an error or a nan in place of a number one patient would be seen.
    """
    wide = value.detach().cpu().double()
    return torch.nan_to_num(wide, nan=0.0, posinf=0.0, neginf=0.0)


def clipped_to(values: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
    """Return arrays of any shapes scaled so that as one vector they are at most so long.

    Raises:
        SiteError: a value is not finite.
    """
    wide = {name: value.detach().cpu().double() for name, value in values.items()}
    norm = float(sum(value.square().sum() for value in wide.values())) ** 0.5
    if not norm < float("inf"):
        raise SiteError(
            "the arrays to be sent contain non-finite values: nothing left the site; lower "
            "'learning-rate'"
        )
    scale = clip_norm / norm if norm > clip_norm else 1.0
    return {name: scale * value for name, value in wide.items()}


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
