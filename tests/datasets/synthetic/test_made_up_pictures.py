import numpy as np
import pytest

from fedsilo.datasets.synthetic.made_up_pictures import (
    Blob,
    Look,
    distance,
    grid,
    smooth_line,
    stroke,
    texture,
)


def test_grid_of_two_pixels_has_their_middles() -> None:
    x, y = grid(2)
    assert x.tolist() == [[-0.5, 0.5], [-0.5, 0.5]]
    assert y.tolist() == [[-0.5, -0.5], [0.5, 0.5]]


def test_round_blob_covers_its_own_area_and_is_half_at_its_edge() -> None:
    weight = Blob(0.2, -0.1, 0.5, soft=0.02).soft_mask(256)
    assert 4 * weight.mean() == pytest.approx(np.pi * 0.5**2, rel=0.01)
    assert Blob(0, 0, 0.5).soft_mask(2)[0, 0] < 0.5 < Blob(0, 0, 0.75).soft_mask(2)[0, 0]


def test_lobed_blob_reaches_further_at_its_lobes_than_between_them() -> None:
    weight = Blob(0, 0, 0.5, lobes=2, depth=0.4, soft=0.05).soft_mask(64)
    x, y = grid(64)
    inside = weight > 0.5
    assert np.abs(x[inside]).max() == pytest.approx(0.7, abs=0.05)
    assert np.abs(y[inside & (np.abs(x) < 0.02)]).max() == pytest.approx(0.3, abs=0.05)


def test_texture_has_unit_variance_and_is_the_same_field_at_any_size() -> None:
    small, large = (texture(np.random.default_rng(1), size, 4) for size in (32, 128))
    pooled = large.reshape(32, 4, 32, 4).mean(axis=(1, 3))
    assert np.abs(pooled - small).max() < 0.2
    many = [texture(np.random.default_rng(seed), 32, 4) for seed in range(20)]
    assert np.std(many) == pytest.approx(1, abs=0.1)


def test_smooth_line_passes_its_corners_and_is_straight_through_straight_ones() -> None:
    line = smooth_line([(0, 0), (1, 0), (1, 1)])
    assert line.shape == (25, 2)
    assert np.allclose(line[[0, 12, 24]], [[0, 0], [1, 0], [1, 1]])
    straight = smooth_line([(0, 0), (1, 2)])
    assert straight[:, 1] == pytest.approx(2 * straight[:, 0])


def test_distance_is_that_of_the_nearest_segment() -> None:
    away = distance(2, np.array([[-0.5, -0.5], [-0.5, 0.5]]))
    assert away.tolist() == [[0, 1], [0, 1]]


def test_stroke_thinner_than_a_pixel_is_fainter() -> None:
    line = np.array([[-1.0, 0.01], [1.0, 0.01]])
    assert stroke(64, line, 0.1).max() == 1
    assert 0.1 < stroke(8, line, 0.05).max() < 0.5


def test_look_without_noise_adds_content_to_the_ground_within_its_field() -> None:
    rng = np.random.default_rng(0)
    plain = Look((0.2, 0.6), contrast=-0.5, grain=0.0)
    shown = plain.show(np.full((2, 4, 4), 0.2, np.float32), rng)
    assert shown[:, 0, 0].tolist() == [26, 128]  # (0.2 - 0.1) * 255, (0.6 - 0.1) * 255
    round_field = Look((0.5,), grain=0.0, field=0.5).show(np.zeros((1, 32, 32), np.float32), rng)
    assert (round_field[0, 0, 0], round_field[0, 16, 16]) == (0, 128)
