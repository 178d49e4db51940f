"""bfloat16, the upper half of a float32 (arXiv:1905.12322), rounded to nearest, ties to even."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]


def to_bf16(values: Floats) -> Bits:
    """Return the bits of ``values``, which are finite, as bfloat16."""
    bits = values.view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: Bits) -> Floats:
    """Return the numbers of bfloat16's bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
