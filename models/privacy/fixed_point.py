"""Numbers in three parts, so that a secret sum of 30 bits carries more digits than a float32.

The first part of a number is its nearest multiple of ``grid``. The rest is magnified; the second
part is its nearest multiple of ``grid``, and the third is what is left, magnified again.

Each part is summed over sites, weighted by samples n_k. With x_k = grid * m_k for a whole m_k, the
sum of n_k x_k is a whole number of grids. A secret sum is wrong by less than half a grid
(``grid_of``), so rounding to the grid gives the sums of the first two parts exactly.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedsilo.models.privacy.secure_sum import SAMPLES, Quantisation

Floats = npt.NDArray[np.float64]

PARTS = 3
_FAR = 0.2  # a distance from a whole number, in grids; rounding errors stay below 1/8


def grid_of(levels: Quantisation, sites: int) -> float:
    """Compute the step to which a site rounds its numbers, so that their secret sum is exact.

    A secret sum has a small error. If all numbers are multiples of this step, rounding the sum to a
    multiple removes the error. The step is the smallest power of two that is at least eight times
    the largest possible error.

    Args:
        levels: the rounding of the secret sum. Its ``samples`` count as at least 16,384.
        sites: the number of summed sites.
    """
    # A site's number n_k x_k = B (w_k x_k) is wrong by at most B times half a step
    error = sites * max(levels.samples, SAMPLES) * levels.step / 2
    return float(2.0 ** math.ceil(math.log2(8 * error)))


def split_numbers(values: Floats, grid: float) -> list[Floats]:
    """Split each of m numbers into three parts, from which ``join_sums`` recovers exact sums.

    The first part is the nearest multiple of ``grid``. The remainder is multiplied by 1 / (grid *
    sqrt(m)), and its nearest multiple of ``grid`` is the second part. The remainder of the second
    part, multiplied again, is the third part, which is not rounded.

    Returns:
        The three parts, (m,) each. The L2 norms of the second and the third are at most about 1/2.
    """
    parts, rest = [], values
    for _ in range(PARTS - 1):
        part = np.rint(rest / grid) * grid
        parts.append(part)
        rest = (rest - part) * _magnification(values, grid)
    return [*parts, rest]


def join_sums(sums: Sequence[Floats], grid: float) -> Floats | None:
    """Join the sums over sites of each number's three parts into the sums of the numbers, (m,).

    The sums come from a secret sum, which has a small error. Rounding the sums of the first two
    parts to multiples of ``grid`` removes the error.

    Args:
        sums: the sum over sites of each part from ``split_numbers``, (m,) each, in order. Each
            site's part is multiplied by a whole number.
        grid: the step of the parts.

    Returns:
        The sums. None if a sum of the first two parts is over 0.2 steps away from a multiple of the
        grid. A site has then probably clipped its numbers.
    """
    # Begins with the last part, which was magnified most often: each step undoes one magnification
    total = sums[-1]
    for part in reversed(sums[:-1]):
        grids = part / grid
        whole = np.rint(grids)
        if np.abs(grids - whole).max() > _FAR:
            return None
        total = whole * grid + total / _magnification(part, grid)
    return total


def _magnification(values: Floats, grid: float) -> float:
    """Return the factor by which remainders are magnified: 1 / (grid * sqrt(m)).

    If each of m remainders is at most half of ``grid``, the magnified remainders have an L2 norm of
    at most 1/2. Here m is the length of ``values``, which are not read.
    """
    return 1 / (grid * math.sqrt(len(values)))
