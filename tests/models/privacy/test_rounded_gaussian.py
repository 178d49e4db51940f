import math
import os
from decimal import getcontext

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, norm

from fedsilo.models.privacy import rounded_gaussian
from fedsilo.models.privacy.rounded_gaussian import exact_normals, rounded_normals


@pytest.mark.parametrize("deviation", [1, 2, 5])
def test_each_whole_number_has_the_probability_of_its_interval(deviation: int) -> None:
    drawn = exact_normals(deviation, 200_000)
    edge = 3 * deviation
    inside = range(-edge, edge + 1)
    found = np.array([(drawn == k).sum() for k in inside] + [(abs(drawn) > edge).sum()])
    ends = norm.cdf((np.array([*inside, edge + 1]) - 0.5) / deviation)
    expected = np.append(np.diff(ends), 1 - (ends[-1] - ends[0]))
    assert chisquare(found, 200_000 * expected).pvalue > 1e-6


@pytest.mark.parametrize("deviation", [2**24, 2**31])
def test_moments_are_those_of_a_normal_number(deviation: int) -> None:
    drawn = exact_normals(deviation, 400_000) / deviation
    assert drawn.mean() == pytest.approx(0, abs=0.01)
    assert drawn.std() == pytest.approx(1, abs=0.01)
    assert (drawn**4).mean() == pytest.approx(3, abs=0.1)
    pairs = drawn.reshape(-1, 2)
    assert np.corrcoef(pairs.T)[0, 1] == pytest.approx(0, abs=0.01)


def test_what_floats_decide_is_what_exact_arithmetic_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With an infinite error every draw is decided by more bits, of the same first ones."""
    words = os.urandom(16 * 400)
    fast = rounded_gaussian._accept_pairs(2**24, 400, _repeated(words))
    pairs_with_error = rounded_gaussian._pairs_with_error

    def unsure(middle: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
        values, error = pairs_with_error(middle, w)
        return values, np.full_like(error, 1.0)

    monkeypatch.setattr(rounded_gaussian, "_pairs_with_error", unsure)
    exact = rounded_gaussian._accept_pairs(2**24, 400, _repeated(words))
    assert len(fast) > 500
    assert fast.tolist() == exact.tolist()


def _repeated(first: bytes):  # type: ignore[no-untyped-def]
    """Return a source of bytes that begins with ``first``."""
    left = [first]

    def take(count: int) -> bytes:
        return left.pop() if left else os.urandom(count)

    return take


@pytest.mark.parametrize("bits", [0, 1, 2**52 - 1, 2**52, 2**53 - 1])
def test_steep_places_are_decided_by_more_bits(bits: int) -> None:
    """At the centre and at the edge of the circle no float is near enough."""
    before = getcontext().prec
    for other in (0, 2**52 - 1, 2**52, 2**52 + 12345, 2**53 - 1):
        pair = rounded_gaussian._decide_by_more_bits(2**24, bits, other, os.urandom)
        u, v = ((2 * k + 1) / 2**53 - 1 for k in (bits, other))
        if pair is not None and 1e-6 < u * u + v * v < 1 - 1e-9:
            f = math.sqrt(-2 * math.log(u * u + v * v) / (u * u + v * v))
            assert pair == pytest.approx((2**24 * u * f, 2**24 * v * f), abs=2)
    assert getcontext().prec == before


def test_no_draw_is_left_out() -> None:
    for count in (0, 1, 7, 1000):
        assert len(exact_normals(2**24, count)) == count
        assert rounded_normals(2**24, count, None).dtype == torch.int64


def test_a_simulations_numbers_are_the_same_for_the_same_seed() -> None:
    one, other = (rounded_normals(1000, 50, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, other)
