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
    """Return the grid: a power of two, at least eight times the largest error of a secret sum.

    Args:
        levels: the quantisation of the sum. Its limit is the clipping norm, 1.
        sites: the number of summed sites.
    """
    # A site's number n_k x_k = B (w_k x_k) is wrong by at most B times half a step
    error = sites * max(levels.samples, SAMPLES) * levels.step / 2
    return float(2.0 ** math.ceil(math.log2(8 * error)))


def split_numbers(values: Floats, grid: float) -> list[Floats]:
    """Split numbers (m,) into three parts, (m,) each.

    The norms of the second and the third part are at most about 1/2.
    """
    parts, rest = [], values
    for _ in range(PARTS - 1):
        part = np.rint(rest / grid) * grid
        parts.append(part)
        rest = (rest - part) * _magnification(values, grid)
    return [*parts, rest]


def join_sums(sums: Sequence[Floats], grid: float) -> Floats | None:
    """Join the sums of the three parts over sites, each weighted by whole numbers of samples, (m,).

    The result is None if a sum of the first two parts is not a whole number of grids. Then a site
    has probably clipped its numbers, and they must be made smaller.
    """
    total = sums[-1]
    for part in reversed(sums[:-1]):
        grids = part / grid
        whole = np.rint(grids)
        if np.abs(grids - whole).max() > _FAR:
            return None
        total = whole * grid + total / _magnification(part, grid)
    return total


def _magnification(values: Floats, grid: float) -> float:
    """Return the factor that gives numbers of at most half a grid each a norm of at most 1/2."""
    return 1 / (grid * math.sqrt(len(values)))
