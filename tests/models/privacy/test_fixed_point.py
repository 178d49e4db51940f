import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.models.maths.glm_steps import LARGEST_NORM
from fedsilo.models.privacy.fixed_point import grid_of, join_sums, split_numbers
from fedsilo.models.privacy.secure_sum import SAMPLES, Quantisation


def summed(parts: list[np.ndarray], samples: int, levels: Quantisation) -> np.ndarray:
    """Quantise a site's part as ``Summand`` does, and return it times the site's samples."""
    own = samples / SAMPLES
    words = levels.quantise(own * np.float32(parts).astype(np.float64))
    return levels.total(words, 1) * SAMPLES


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, SAMPLES), min_size=3, max_size=6))
def test_secret_sums_of_split_numbers_are_exact_beyond_float32(seed, samples):
    rng, size = np.random.default_rng(seed), 60
    levels = Quantisation(1.0, 32 - int(np.ceil(np.log2(len(samples)))))
    grid = grid_of(levels, len(samples))
    totals, wanted = np.zeros((3, size)), np.zeros(size)
    for count in samples:
        values = rng.normal(size=size)
        values *= LARGEST_NORM / np.linalg.norm(values)
        parts = split_numbers(values, grid)
        assert np.linalg.norm(np.concatenate(parts)) < 1  # so that no site clips them
        totals += summed(parts, count, levels)
        wanted += count * values
    joined = join_sums(list(totals), grid)
    assert joined is not None
    np.testing.assert_allclose(joined, wanted, atol=1e-7, rtol=0)


def test_clipped_numbers_are_noticed():
    grid = 2.0**-12
    parts = split_numbers(np.linspace(0.01, 0.1, 30), grid)
    assert join_sums([100 * part for part in parts], grid) is not None
    assert join_sums([99.3 * part for part in parts], grid) is None
