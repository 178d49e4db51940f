from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.datasets.synthetic.vessel_trees import ANATOMIES, Tree, smooth_line


@given(st.integers(0, 10**6), st.sampled_from(ANATOMIES))
@settings(max_examples=30)
def test_a_way_follows_vessels_and_a_path_stays_within_them(seed: int, anatomy: str) -> None:
    rng = np.random.default_rng(seed)
    tree = Tree.random(rng, anatomy)
    path = tree.path(rng)
    assert np.isfinite(path).all()
    assert ((path[:, 2] > 0.01) & (path[:, 2] < 0.03)).all()
    way = np.concatenate(tree.ways)
    away = np.hypot(*(path[:, None, :2] - way[None, :, :2]).transpose(2, 0, 1))
    # At most 0.6 radii from the middle; rounding off a fork may take it a little further
    assert (away.min(axis=1) < 0.75 * way[away.argmin(axis=1), 2] + 0.06).all()
    assert np.hypot(*np.diff(path[:, :2], axis=0).T).max() < 0.25


def test_a_line_is_cut_into_even_steps_and_its_radius_changes_evenly() -> None:
    line = smooth_line([(0, 0), (0.6, 0)], 0.2, 0.1)
    assert line.shape == (11, 3)
    assert line[:, 0] == pytest.approx(np.linspace(0, 0.6, 11))
    assert line[:, 1] == pytest.approx(np.zeros(11))
    assert line[:, 2] == pytest.approx(np.linspace(0.2, 0.1, 11))


def test_a_line_passes_its_corners_inside_and_keeps_its_ends() -> None:
    line = smooth_line([(0, 0), (1, 0), (1, 1)], 0.1, 0.1)
    assert line[0, :2].tolist() == [0, 0]
    assert line[-1, :2].tolist() == [1, 1]
    corner = np.hypot(line[:, 0] - 1, line[:, 1]).min()
    assert 0.1 < corner < 0.3
    assert (line[:, 0] <= 1).all()
    assert (line[:, 1] >= 0).all()
