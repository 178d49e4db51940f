import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedsilo.models.privacy.release import UNITS, Release

ANY = st.floats(width=64, allow_nan=True, allow_infinity=True)
BOUNDS = st.one_of(
    st.floats(5e-324, 1.7e308), st.sampled_from([5e-324, 1e-45, 1e-36, 1.0, 1e38, 1.7e308])
)


def exact_length(parts: dict[str, torch.Tensor], row: int) -> int:
    """Return the squared norm of a row's part, without any error."""
    return sum(int(n) ** 2 for part in parts.values() for n in part[row].flatten().tolist())


@given(arrays(np.float64, (3, 5), elements=ANY), BOUNDS)
def test_no_part_is_longer_than_the_bound_whatever_the_numbers_are(
    rows: np.ndarray,
    bound: float,  # type: ignore[type-arg]
) -> None:
    release = Release(bound, 1.0, 1, None)
    values = torch.from_numpy(rows)
    parts = release.parts({"w": values[:, :3].reshape(3, 3, 1), "b": values[:, 3:]})
    assert all(exact_length(parts, row) <= UNITS**2 for row in range(3))


@given(arrays(np.float64, (1, 4), elements=st.floats(-1e150, 1e150)), st.floats(1e-6, 1e6))
def test_what_is_short_enough_keeps_its_direction_and_length(
    row: np.ndarray,
    bound: float,  # type: ignore[type-arg]
) -> None:
    part = Release(bound, 1.0, 1, None).parts({"": torch.from_numpy(row)})[""].double()
    norm = float(np.linalg.norm(row / max(1.0, abs(row).max()))) * max(1.0, abs(row).max())
    clipped = row * (bound / norm if norm > bound else 1.0)
    assert np.abs(part.numpy() * (bound / UNITS) - clipped).max() <= 1.001 * bound / UNITS


@given(arrays(np.float32, (2, 3), elements=st.floats(width=32)), st.integers(0, 1))
def test_a_sum_moves_by_the_part_of_the_patient_who_is_gone(
    rows: np.ndarray,
    gone: int,  # type: ignore[type-arg]
) -> None:
    release = Release(1.0, 1.0, 1, None)
    whole = release.sums({"": torch.from_numpy(rows)})[""]
    without = release.sums({"": torch.from_numpy(rows[[1 - gone]])})[""]
    own = release.parts({"": torch.from_numpy(rows[[gone]])})[""][0]
    assert torch.equal(whole - without, own)


def test_the_noise_is_the_multiplier_in_bounds_and_on_whole_steps() -> None:
    release = Release(2.0, 3.0, 1, None)
    left = release.with_noise({"w": torch.full((40_000,), UNITS)})["w"]
    assert float(left.mean()) == pytest.approx(2.0, abs=0.15)
    assert float(left.std()) == pytest.approx(6.0, rel=0.02)
    steps = left * (UNITS / 2.0)
    assert torch.equal(steps, steps.round())


def test_no_more_leaves_than_was_paid_for() -> None:
    release = Release(1.0, 1.0, 2, None)
    for _ in range(2):
        release.with_noise({"w": torch.zeros(1, dtype=torch.int64)})
    with pytest.raises(RuntimeError, match="charged"):
        release.with_noise({"w": torch.zeros(1, dtype=torch.int64)})


def test_what_was_not_bounded_cannot_leave() -> None:
    with pytest.raises(RuntimeError, match="not of whole units"):
        Release(1.0, 1.0, 1, None).with_noise({"w": torch.zeros(1)})


@pytest.mark.parametrize("noise", [1e-45, 1e-9, 0.3, 1.0, 76.0, 1e6])
def test_the_noise_is_never_less_than_is_charged(noise: float) -> None:
    deviation = math.ceil(noise * UNITS)
    assert deviation >= 1
    assert deviation / UNITS >= noise


def test_no_hospital_draws_the_same_noise_twice() -> None:
    sums = {"w": torch.zeros(8, dtype=torch.int64)}
    draws = [Release(1.0, 1.0, 1, None).with_noise(sums)["w"].tolist() for _ in range(20)]
    assert all(one != other for one, other in pairwise(draws))
