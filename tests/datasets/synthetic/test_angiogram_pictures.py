from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedsilo.datasets.images.decoding import Pixels
from fedsilo.datasets.synthetic.angiogram_pictures import LOOKS, render
from fedsilo.datasets.synthetic.vessel_trees import ANATOMIES

KINDS = list(itertools.product(LOOKS, ANATOMIES))


def painted(
    source: str, anatomy: str, sequence: int = 0, frame: int = 0, size: int = 32
) -> tuple[Pixels, Pixels]:
    generators = np.random.default_rng([1, sequence]), np.random.default_rng([2, frame])
    return render(source, anatomy, *generators, size)


@pytest.mark.parametrize(("source", "anatomy"), KINDS)
def test_equal_generators_draw_equal_frames_and_others_others(source: str, anatomy: str) -> None:
    image, mask = painted(source, anatomy)
    for found in (image, mask):
        assert (found.shape, found.dtype.name) == ((32, 32), "uint8")
    again = painted(source, anatomy)
    assert (again[0] == image).all()
    assert (again[1] == mask).all()
    assert (painted(source, anatomy, sequence=1)[0] != image).any()
    assert (painted(source, anatomy, frame=1)[0] != image).any()
    assert image.std() > 5


@pytest.mark.parametrize("source", LOOKS)
def test_the_size_only_decides_how_finely_a_frame_is_sampled(source: str) -> None:
    for number, anatomy in enumerate(ANATOMIES):
        large, large_mask = painted(source, anatomy, number, number, 256)
        small, small_mask = painted(source, anatomy, number, number, 64)
        pooled = large.reshape(64, 4, 64, 4).mean(axis=(1, 3))
        assert np.abs(pooled - small).mean() < 12
        assert np.corrcoef(pooled.ravel(), small.ravel())[0, 1] > 0.85
        covered = large_mask.reshape(64, 4, 64, 4).max(axis=(1, 3)) > 0
        assert covered[small_mask > 0].mean() > 0.9 or not small_mask.any()


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what frees a source's look of clutter, noise, blur and collimator, and changes it."""

    def change(source: str, **subject: Any) -> None:
        there, machine = LOOKS[source]
        sharp = dataclasses.replace(machine, noise=0.0, blur=0.001, field="whole")
        changed = dataclasses.replace(there, clutter=0.0, **subject)
        monkeypatch.setitem(LOOKS, source, (changed, sharp))

    return change


@pytest.mark.parametrize("source", LOOKS)
def test_the_mask_is_where_the_catheter_is_seen_and_nowhere_else(
    source: str, clean: Callable[..., None]
) -> None:
    numbers = [(anatomy, number) for anatomy in ANATOMIES for number in range(4)]
    clean(source)
    frames = [painted(source, anatomy, n, n, 64) for anatomy, n in numbers]
    clean(source, device=0.0)
    without = [painted(source, anatomy, n, n, 64)[0] for anatomy, n in numbers]
    for (image, mask), bare in zip(frames, without, strict=True):
        seen = np.abs(image.astype(int) - bare)
        assert not mask.any() or (seen[mask > 0] > 0).mean() > 0.95
        assert seen[mask > 0].sum() >= 0.75 * seen.sum()  # the rest are pixels partly covered
        assert not (seen[~near(mask)] > 3).any()


def near(mask: Pixels) -> npt.NDArray[np.bool_]:
    """Return the mask and its neighbouring pixels."""
    wide = np.pad(mask > 0, 1)
    views = [wide[i : i + 64, j : j + 64] for i in range(3) for j in range(3)]
    return np.array(np.stack(views).max(axis=0), dtype=np.bool_)


def test_some_frames_show_no_catheter_and_their_masks_are_empty() -> None:
    empty = [not painted("silicone", "arch", n, n)[1].any() for n in range(120)]
    assert np.mean(empty) == pytest.approx(0.12, abs=0.08)


@pytest.mark.parametrize("anatomy", ANATOMIES)
def test_a_catheter_is_thin_and_of_one_piece(anatomy: str) -> None:
    from scipy.ndimage import label

    for number in range(12):
        mask = painted("simulation", anatomy, number, number, 64)[1]
        assert label(mask, np.ones((3, 3)))[1] <= 2  # two where it leaves the picture in between
        assert mask.mean() < 0.06


def test_nothing_is_marked_where_the_collimator_lets_no_light_through() -> None:
    for number in range(12):
        for anatomy in ANATOMIES:
            image, mask = painted("human", anatomy, number, number, 64)
            assert image[:2, :2].max() < 30
            assert not mask[:3, :3].any()


def test_frames_of_a_sequence_share_tree_and_background_but_not_the_catheters_place() -> None:
    shared, other = [], []
    places = set()
    for number in range(10):
        first, mask = painted("animal", "carotid", number, 0)
        places.add(mask.tobytes())
        second, moved = painted("animal", "carotid", number, 1)
        assert mask.any() != moved.any() or (mask != moved).any()
        shared.append(np.corrcoef(first.ravel(), second.ravel())[0, 1])
        other.append(
            np.corrcoef(first.ravel(), painted("animal", "carotid", number + 10, 1)[0].ravel())[
                0, 1
            ]
        )
    assert np.median(shared) > np.median(other) + 0.1
    assert len(places) == 10


def test_sources_differ_in_ground_and_field_and_simulation_is_bright_on_dark() -> None:
    frames = {
        source: np.stack([painted(source, a, n, n)[0] for a in ANATOMIES for n in range(5)])
        for source in LOOKS
    }
    middle = {source: np.median(found) for source, found in frames.items()}
    assert min(middle["silicone"], middle["animal"]) > 170
    assert 80 < middle["human"] < 190
    assert middle["simulation"] < 80
    corner = {source: np.median(found[:, :2, :2]) for source, found in frames.items()}
    assert corner["human"] < 10 < 100 < corner["silicone"]
    noise = {
        source: np.median(np.abs(np.diff(found.astype(float), axis=2)))
        for source, found in frames.items()
    }
    assert noise["animal"] > noise["human"] > noise["simulation"]


def test_vessels_are_dark_on_human_and_bright_on_simulated_frames(
    clean: Callable[..., None],
) -> None:
    for source, sign in (("human", -1), ("animal", -1), ("silicone", -1), ("simulation", 1)):
        clean(source)
        seen = painted(source, "arch", size=64)[0].astype(int)
        clean(source, lumen=(0.0, 0.0), wall=0.0)
        change = sign * (seen - painted(source, "arch", size=64)[0])
        assert change.min() >= 0
        assert (change > 5).mean() > 0.03
