"""bfloat16, the upper half of a float32 (arXiv:1905.12322), rounded to nearest, ties to even."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]


def to_bf16(values: Floats) -> Bits:
    """Round ``values``, which must be finite, to bfloat16 and return the bits."""
    # Adding just below half a unit, and one more if the kept part is odd, carries exactly when
    # "nearest, ties to even" rounds up. A NaN could become infinite here
    bits = values.view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: Bits) -> Floats:
    """Convert the bits of bfloat16 to float32, which is exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
