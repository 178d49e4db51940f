import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.datasets.radiographs.vendor_profiles import SHOULDERED, SIGMOID, STEEP, Profile

PROFILES = (SHOULDERED, SIGMOID, STEEP)
every_profile = pytest.mark.parametrize("profile", PROFILES)


def level(value: float) -> np.ndarray:
    return np.array([value], dtype=np.float32)


@every_profile
@given(st.floats(0, 1, width=32), st.floats(0, 1, width=32))
def test_a_curve_rises_and_stays_within_0_and_1(profile: Profile, one: float, other: float) -> None:
    low, high = (float(profile.curve(level(x))[0]) for x in sorted((one, other)))
    assert -1e-6 <= low <= high + 1e-6
    assert high <= 1 + 1e-6


@every_profile
def test_a_curve_keeps_black_and_white_and_rises_throughout(profile: Profile) -> None:
    levels = np.linspace(0, 1, 257, dtype=np.float32)
    curved = profile.curve(levels)
    assert curved[[0, -1]] == pytest.approx([0, 1], abs=1e-6)
    assert (np.diff(curved) > 0).all()
    assert curved.dtype == np.float32


def test_curves_have_the_values_of_their_formulas() -> None:
    assert SHOULDERED.curve(level(0.5))[0] == pytest.approx(1 - (1 - 0.5**0.7) ** 1.4)
    assert SIGMOID.curve(level(0.5))[0] == pytest.approx(0.5)
    assert STEEP.curve(level(0.5))[0] == pytest.approx(0.5**2.4)


def test_standardising_an_image_does_not_undo_a_curve() -> None:
    levels = np.linspace(0, 1, 1001, dtype=np.float32)
    curves = [levels, *(profile.curve(levels) for profile in PROFILES)]
    standardised = [(curve - curve.mean()) / curve.std() for curve in curves]
    for place, one in enumerate(standardised):
        for other in standardised[:place]:
            assert np.abs(one - other).max() > 0.3


@every_profile
def test_black_stays_black_and_equal_draws_give_equal_pictures(profile: Profile) -> None:
    picture = np.zeros((9, 12), dtype=np.float32)
    picture[2:5, 3:9] = 0.6
    made = [profile.render(picture, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert made[0].shape == picture.shape
    assert made[0].dtype == np.float32
    assert (made[0] == made[1]).all()
    assert (made[0] != made[2]).any()
    assert (made[0][7:] == 0).all()
    assert picture.max() == np.float32(0.6), "the picture itself is not changed"


def test_noise_goes_with_the_root_of_brightness() -> None:
    plain = Profile(lambda light: light, noise=0.02, blur=0.0)
    for brightness in (0.25, 0.64):
        picture = np.full((200, 200), brightness, dtype=np.float32)
        noise = plain.render(picture, np.random.default_rng(3)) - picture
        assert noise.std() == pytest.approx(0.02 * brightness**0.5, rel=0.03)
        assert noise.mean() == pytest.approx(0, abs=5e-4)


def test_blur_gives_a_share_to_each_neighbour_and_loses_no_light() -> None:
    soft = Profile(lambda light: light, noise=0.0, blur=0.1)
    picture = np.zeros((5, 5), dtype=np.float32)
    picture[2, 2] = 1
    made = soft.render(picture, np.random.default_rng(0))
    assert made[2, 1:4] == pytest.approx([0.08, 0.64, 0.08])
    assert made[1, 1:4] == pytest.approx([0.01, 0.08, 0.01])
    flat = np.full((3, 4), 0.5, dtype=np.float32)
    assert soft.render(flat, np.random.default_rng(0)) == pytest.approx(flat)
