"""Clip arrays as one vector, and draw random numbers in floating point.

Releases that are private per patient do not use this module but ``fedsilo.models.privacy.release``,
which computes in whole numbers.
"""

import math
import os
from collections.abc import Mapping

import torch
from torch import Tensor

from fedsilo.core.errors import SiteError


def replace_nonfinite(value: Tensor) -> Tensor:
    """Copy an array to float64 on the CPU, and replace NaN and infinite values by 0.

    A NaN in a sum, or an error because of it, would reveal that one patient has such a value.
    """
    wide = value.detach().cpu().double()
    return torch.nan_to_num(wide, nan=0.0, posinf=0.0, neginf=0.0)


def clip_to_norm(values: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
    """Scale arrays down until their joint L2 norm is at most ``clip_norm``.

    The result is float64 on the CPU. If the joint norm is small enough, the values are unchanged.

    Raises:
        SiteError: a value is not finite.
    """
    wide = {name: value.detach().cpu().double() for name, value in values.items()}
    norm = float(sum(value.square().sum() for value in wide.values())) ** 0.5
    # The comparison is false for NaN too
    if not norm < float("inf"):
        raise SiteError(
            "the arrays to be sent contain non-finite values: nothing left the site; lower "
            "'train.learning-rate'"
        )
    scale = 1.0
    if norm > clip_norm:
        scale = clip_norm / norm
    return {name: scale * value for name, value in wide.items()}


def normals(
    shape: torch.Size, rng: torch.Generator | None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Draw standard normal numbers of the given shape, on the CPU.

    Args:
        shape: the shape of the result.
        rng: a generator of the CPU. If None, the numbers come from random bits of the operating
            system, and nobody can repeat them.
        dtype: the type of the result.
    """
    if rng is not None:
        return torch.randn(shape, generator=rng, dtype=dtype)
    count = shape.numel()
    if not count:
        return torch.zeros(shape, dtype=dtype)
    # Box and Muller 1958. log1p(-u) with u in [0, 1) is finite, where log(u) would be infinite at 0
    uniform = uniforms(2 * count, None)
    radius = torch.sqrt(-2 * torch.log1p(-uniform[:count]))
    return (radius * torch.cos(2 * math.pi * uniform[count:])).reshape(shape).to(dtype)


def uniforms(count: int, rng: torch.Generator | None) -> Tensor:
    """Draw ``count`` uniform numbers in [0, 1), float64, on the CPU.

    With ``rng``, the generator draws them. Without it, they are multiples of 2^-53 from random bits
    of the operating system, and nobody can repeat them.
    """
    if rng is not None:
        return torch.rand(count, generator=rng, dtype=torch.float64)
    if not count:
        return torch.zeros(0, dtype=torch.float64)
    # Protection needs cryptographic numbers. torch's generator has only 2^32 seeds, and its state
    # follows from a few of its outputs; so the bytes come from the system
    words = torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64)
    # 53 bits, as many as a float64 holds exactly; the mask removes the sign that >> keeps
    return (words >> 11 & (2**53 - 1)).double() * 2.0**-53
