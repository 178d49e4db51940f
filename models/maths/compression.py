"""Updates in fewer bytes: fewer bits a number, fewer numbers, and a memory of what was left out.

Equations:
  (stochastic rounding, arXiv:1610.02132) E[q] = v / scale, scale = max |v| / 127
    -> models.maths.compression.to_int8
  (top-k, arXiv:1809.07599) the k numbers of largest magnitude -> models.maths.compression.largest
  (error feedback, arXiv:1901.09847) p = update + memory, memory = p - sent
    -> strategies.wire.compressed.Compression.packed

bfloat16 is the upper half of a float32 (arXiv:1905.12322), rounded to nearest, ties to even.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]
Steps = npt.NDArray[np.int8]

MOST_STEPS = 127  # of int8, on either side of 0


def to_bf16(values: Floats) -> Bits:
    """Return the bits of ``values``, which are finite, as bfloat16."""
    bits = values.view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: Bits) -> Floats:
    """Return the numbers of bfloat16's bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_int8(values: Floats, uniform: Floats) -> tuple[np.float32, Steps]:
    """Return a scale and whole numbers from -127 to 127, which times the scale are ``values``.

    Args:
        values: (n,), finite.
        uniform: (n,) random numbers from 0 to 1, exclusive: what is between two whole numbers
            goes to the upper one with the probability of its distance to the lower one.
    """
    scale = np.float32(np.abs(values).max(initial=0.0) / np.float32(MOST_STEPS))
    if not scale:  # all are 0, or too small to be divided
        return scale, np.zeros(values.shape, np.int8)
    steps = np.floor(values / scale + uniform).clip(-MOST_STEPS, MOST_STEPS)
    return scale, steps.astype(np.int8)


def from_int8(scale: np.float32, steps: Steps) -> Floats:
    """Return the numbers that ``to_int8`` made steps of."""
    return steps.astype(np.float32) * scale


def largest(values: Floats, count: int) -> npt.NDArray[np.bool_]:
    """Return where the ``count`` numbers of largest magnitude are; of equal ones the first.

    Args:
        values: (n,), finite.
        count: from 1 to n.
    """
    sizes: npt.NDArray[Any] = np.abs(values)
    least = np.partition(sizes, len(sizes) - count)[len(sizes) - count]
    chosen: npt.NDArray[np.bool_] = sizes > least
    equal = np.flatnonzero(sizes == least)
    chosen[equal[: count - int(chosen.sum())]] = True
    return chosen
