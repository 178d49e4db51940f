"""Exact sampling of Gaussian noise that is rounded to whole numbers.

Floating-point noise cannot take some values, and the missing values reveal the number that the
noise was added to (Mironov 2012). Here the noise is a whole number: k has exactly the probability
that N(0, s^2) lies between k - 1/2 and k + 1/2. Rounding commutes with adding a whole number:
round(x + k) is round(x) + k. So adding this noise to whole numbers gives the same result as
rounding the answer of the Gaussian mechanism. The (epsilon, delta) is therefore the same, for
random batches too.

The method is Marsaglia's polar method (1964). For a random point (u, v) within the unit circle and
w = u^2 + v^2, the numbers u f and v f with f = sqrt(-2 ln(w) / w) are normal. A computer knows only
finitely many bits of u and v, and its logarithms have an error. A draw is accepted if all numbers
within these errors round to the same whole numbers; otherwise more random bits decide the draw.
"""

import os
from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# A larger float64 has too few digits behind the point to be rounded reliably
LARGEST_DEVIATION = 2**46
Bytes = Callable[[int], bytes]
_Floats = npt.NDArray[np.float64]
_Whole = npt.NDArray[np.int64]
# First bits of u and of v, and further bits per step of an undecided draw
_BITS, _MORE = 53, 64
# Half of the interval that the first bits of u leave open
_HALF = 2.0**-53
# The relative error of f. Libraries promise 4 units in the last place, 2^-50; this is 16 times that
_LIBRARY = 2.0**-46
# Pairs drawn at once, and the accepted share: the circle covers pi / 4 of its square
_AT_ONCE, _ACCEPTED = 2**18, 0.785


def rounded_normals(deviation: int, count: int, source: torch.Generator | None) -> Tensor:
    """Draw ``count`` Gaussian numbers of mean 0, rounded to whole numbers, int64.

    Args:
        deviation: standard deviation, at most ``LARGEST_DEVIATION``.
        count: the number of draws.
        source: None to draw random bits from the operating system, so that each whole number has
            exactly its probability. A generator, for simulations, gives repeatable numbers, whose
            probabilities are only approximate.
    """
    if source is not None:
        drawn = torch.randn(count, generator=source, dtype=torch.float64)
        return (deviation * drawn).round().long()
    return torch.from_numpy(exact_normals(deviation, count))


def exact_normals(deviation: int, count: int, random_bytes: Bytes = os.urandom) -> _Whole:
    """Draw ``count`` Gaussian numbers of mean 0, rounded to whole numbers with exact probabilities.

    Random points in a square are drawn in batches, and each point inside the unit circle gives two
    numbers (``_accept_pairs``). Batches follow until there are enough numbers. Surplus numbers are
    dropped.

    Args:
        deviation: standard deviation, at most ``LARGEST_DEVIATION``. This limit is not checked.
        count: the number of draws. 0 gives an empty array.
        random_bytes: a function of a number n that returns n random bytes.

    Returns:
        The numbers, (count,) int64.
    """
    found: list[_Whole] = []
    missing = count
    while missing > 0:
        pairs = min(_AT_ONCE, int(missing / 2 / _ACCEPTED) + 16)
        found.append(_accept_pairs(deviation, pairs, random_bytes)[:missing])
        missing -= len(found[-1])
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def _accept_pairs(deviation: int, pairs: int, random_bytes: Bytes) -> _Whole:
    """Draw random points in a square, and convert those inside the unit circle to Gaussian numbers.

    The square is [-1, 1]^2. A point inside the circle gives two independent numbers of mean 0 and
    the given standard deviation (polar method). Each number is rounded to the right whole number.
    Points outside are dropped.

    Args:
        deviation: the standard deviation, at most ``LARGEST_DEVIATION``.
        pairs: the number of points to draw.
        random_bytes: a function of n that returns n random bytes. More bytes are drawn for a point
            whose rounding is not certain.

    Returns:
        int64 numbers, (2 * points inside the circle,). The two numbers of a point are adjacent.
    """
    words = np.frombuffer(random_bytes(16 * pairs), dtype=np.uint64) >> np.uint64(64 - _BITS)
    bits = words.astype(np.int64).reshape(pairs, 2)
    # (2k + 1) / 2^53 - 1 is the middle of the interval that the bits k leave open; float64 holds it
    # exactly
    middle = (2 * bits + 1 - 2**_BITS).astype(np.float64) * 2.0**-_BITS
    squared = np.square(middle)
    w = squared[:, 0] + squared[:, 1]
    outside = w > 1 + 2.0**-40
    # Near 0 and 1 the formulas are too steep for their error bound, so more bits decide there
    steep = ~outside & ((w < 2.0**-60) | (w > 1 - 2.0**-40))
    values, error = _pairs_with_error(middle, np.where(outside | steep, 0.5, w))
    values, error = deviation * values, deviation * error
    low, high = np.rint(values - error), np.rint(values + error)
    differ = low != high
    undecided = steep | (~outside & (differ[:, 0] | differ[:, 1]))
    whole = low.astype(np.int64)
    for row in np.flatnonzero(undecided):
        # Undecided draws keep their place. At the end of the array they would be cut off more often
        # than others, which would change the distribution
        pair = _decide_by_more_bits(deviation, int(bits[row, 0]), int(bits[row, 1]), random_bytes)
        outside[row] = pair is None
        whole[row] = pair or (0, 0)
    accepted: _Whole = whole[~outside].reshape(-1)
    return accepted


def _pairs_with_error(middle: _Floats, w: _Floats) -> tuple[_Floats, _Floats]:
    """Compute the Gaussian numbers u f and v f of n points (u, v), and a bound on their errors.

    The factor f is sqrt(-2 ln w / w) with w = u^2 + v^2. Each coordinate is uncertain by 2^-53,
    because only its first 53 random bits are drawn. The bound covers this uncertainty and the
    rounding errors of float64, times four for safety.

    Args:
        middle: u and v, (n, 2), each the middle of the interval that its 53 bits leave open.
        w: u^2 + v^2, (n,), above 0 and below 1.

    Returns:
        The numbers (n, 2) and the bounds (n, 2).
    """
    logarithm = np.log(w)
    f = np.sqrt(-2 * logarithm / w)
    # The first bits leave w uncertain by less than 2^-50 sqrt(w) + 2^-104, rounding included
    of_w = (2.0**-50 * np.sqrt(w) + 2.0**-104) / w
    # Both terms in brackets are positive, because w is below 1 and its logarithm below 0
    # The relative error of f is |1/2 - 1/(2 ln w)| times that of w
    of_f = f * (of_w * (0.5 - 0.5 / logarithm) + _LIBRARY)
    # The error of u f has two parts: u times the error of f, and f times the error of u
    error = np.abs(middle) * of_f[:, None] + _HALF * f[:, None]
    return middle * f[:, None], 4 * error


def _decide_by_more_bits(
    deviation: int, u: int, v: int, random_bytes: Bytes
) -> tuple[int, int] | None:
    """Draw more bits of a random point (u, v) until its two rounded Gaussian numbers are certain.

    The polar method turns a point in the unit circle into two Gaussian numbers. The bits drawn so
    far leave a small square of possible points. At least once, 64 more bits are drawn for each
    coordinate. Drawing ends when it is certain that all points of the square give the same two
    whole numbers, or that they are outside the unit circle.

    Args:
        deviation: the standard deviation of the numbers.
        u: the first 53 random bits of the first coordinate, as a whole number k. The coordinate is
            between k / 2^52 - 1 and (k + 1) / 2^52 - 1.
        v: the same for the second coordinate.
        random_bytes: a function of n that returns n random bytes.

    Returns:
        The two whole numbers, or None if the point is outside the unit circle.
    """
    bits = _BITS
    while True:
        # New bits follow the old ones and only narrow the interval. Drawing another point instead
        # would make numbers near the edges of rounding rarer than they should be
        u = u << _MORE | int.from_bytes(random_bytes(_MORE // 8))
        v = v << _MORE | int.from_bytes(random_bytes(_MORE // 8))
        bits += _MORE
        answer = _from_intervals(deviation, _interval(u, bits), _interval(v, bits), bits)
        if answer is None:
            return None
        if answer:
            return answer[0], answer[1]


def _interval(number: int, bits: int) -> tuple[int, int, int]:
    """Return the sign of a random coordinate in -1..1, and two bounds of its absolute value.

    ``number`` holds the first ``bits`` random bits of the coordinate. With h = 2^(bits-1), they say
    that the coordinate lies between (number - h) / h and (number - h + 1) / h.

    Returns:
        The sign, 1 or -1. Then the smaller and the larger bound, two successive whole numbers that
        count steps of 1 / h.
    """
    half = 1 << (bits - 1)
    if number >= half:
        return 1, number - half, number - half + 1
    return -1, half - number - 1, half - number


def _from_intervals(
    deviation: int, u: tuple[int, int, int], v: tuple[int, int, int], bits: int
) -> list[int] | None:
    """Compute two rounded Gaussian numbers from intervals in which the coordinates u and v lie.

    By Marsaglia's polar method, u f and v f are standard normal if w = u^2 + v^2 is below 1 and f =
    sqrt(-2 ln w / w). Each step is bounded from below and above. A number is certain if its two
    bounds round to the same whole number.

    Args:
        deviation: the standard deviation of the numbers.
        u: the first coordinate: its sign, and two whole numbers that enclose its absolute value, in
            units of 2^(1-bits).
        v: the second coordinate, in the same form.
        bits: the number of random bits per coordinate. The computation has as many decimal digits.

    Returns:
        The two whole numbers. None if the point certainly lies outside the unit circle. An empty
        list if more bits are needed to be certain.
    """
    # Each line is bounded from below with ``down`` and from above with ``up``. decimal returns the
    # nearest number for roots and logarithms, so its two neighbours enclose the true value.
    # A decimal digit is worth more than three bits, so these are more digits than needed
    digits = bits
    down = Context(prec=digits, rounding=ROUND_FLOOR, Emin=-(10**6), Emax=10**6)
    up = Context(prec=digits, rounding=ROUND_CEILING, Emin=-(10**6), Emax=10**6)
    one = 1 << 2 * (bits - 1)
    least, most = u[1] ** 2 + v[1] ** 2, u[2] ** 2 + v[2] ** 2
    if least >= one:
        return None
    if most >= one or least == 0:
        return []
    w_low, w_high = down.divide(Decimal(least), one), up.divide(Decimal(most), one)
    f_low = down.divide(down.multiply(-2, up.next_plus(up.ln(w_high))), w_high)
    f_high = up.divide(up.multiply(-2, down.next_minus(down.ln(w_low))), w_low)
    f_low, f_high = down.next_minus(down.sqrt(f_low)), up.next_plus(up.sqrt(f_high))
    whole = []
    for sign, low, high in (u, v):
        x_low = down.divide(down.multiply(down.multiply(deviation, low), f_low), 1 << bits - 1)
        x_high = up.divide(up.multiply(up.multiply(deviation, high), f_high), 1 << bits - 1)
        lower = down.add(x_low, Decimal("0.5")).to_integral_value(ROUND_FLOOR)
        upper = up.add(x_high, Decimal("0.5")).to_integral_value(ROUND_FLOOR)
        if lower != upper:
            return []
        whole.append(sign * int(lower))
    return whole
