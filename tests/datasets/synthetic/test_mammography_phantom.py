from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsilo.datasets.io.locations import Places
from fedsilo.datasets.registry import load_silo, silo_names
from fedsilo.datasets.synthetic.mammogram_pictures import random_breast, render
from fedsilo.datasets.synthetic.mammography_phantom import (
    COUNTS,
    MAMMOGRAPHY_PHANTOM,
    PLAN,
    phantom_mammogram,
)
from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.settings import CommonSettings

PHANTOM = CommonSettings(dataset="mammography-phantom", image_size=32, sample_share=0.05)
SITES = ["hologic", "siemens", "ge"]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(None, tmp_path / "cache")


def test_the_vendors_have_the_papers_sizes_and_malignancies(places: Places) -> None:
    assert silo_names(PHANTOM) == SITES
    whole = dataclasses.replace(PHANTOM, sample_share=1.0)
    for site, counts in (("hologic", [730, 730]), ("siemens", [287, 123]), ("ge", [421, 431])):
        index = MAMMOGRAPHY_PHANTOM.index(site, whole, places)
        assert np.bincount(index.labels).tolist() == counts
    with pytest.raises(DataError, match="no silo 'fuji': 3 silos are hologic, siemens, ge"):
        load_silo("fuji", PHANTOM, places)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5])
def test_a_sample_has_the_vendors_proportions_and_at_least_eight_images(
    places: Places, share: float
) -> None:
    sampled = dataclasses.replace(PHANTOM, sample_share=share)
    for site, counts in COUNTS.items():
        index = MAMMOGRAPHY_PHANTOM.index(site, sampled, places)
        assert len(index) == max(8, round(share * sum(counts)))
        malignant = counts[1] * len(index) / sum(counts)
        assert int(index.labels.sum()) == pytest.approx(malignant, abs=4)


def test_some_patients_have_two_images_of_one_breast() -> None:
    for site in SITES:
        labels, patients = map(np.array, PLAN.sequence(site))
        again = patients[1:] == patients[:-1]
        assert again.mean() == pytest.approx(0.3, abs=0.06)
        assert (labels[1:][again] == labels[:-1][again]).all()
        assert (np.diff(patients) <= 1).all()


def test_an_image_is_the_same_each_time_and_no_other_is_like_it() -> None:
    torch.manual_seed(1)
    np.random.seed(1)  # whatever the global generators
    images = [phantom_mammogram(site, i, 32) for site in SITES for i in range(8)]
    again = [phantom_mammogram(site, i, 32) for site in SITES for i in range(8)]
    assert all((a == b).all() for a, b in zip(images, again, strict=True))
    assert len({image.tobytes() for image in images}) == len(images)
    assert {(image.shape, image.dtype.name) for image in images} == {((32, 32), "float32")}
    assert all(0 <= image.min() < image.max() <= 1 for image in images)


def test_the_size_only_decides_how_finely_an_image_is_sampled() -> None:
    for number in range(10):
        large = phantom_mammogram("hologic", number, 256, profile=False)
        pooled = large.reshape(64, 4, 64, 4).mean(axis=(1, 3))
        small = phantom_mammogram("hologic", number, 64, profile=False)
        assert np.corrcoef(pooled.ravel(), small.ravel())[0, 1] > 0.98
        assert np.abs(pooled - small).mean() < 0.02


def test_a_breast_lies_at_one_chest_wall_in_the_dark() -> None:
    sides = set()
    for number in range(40):
        picture = phantom_mammogram("ge", number, 64, profile=False)
        assert picture.max() > 0.2
        assert (picture[[0, -1], -1] < 0.01).all(), "air in the corners away from the breast"
        lit = np.flatnonzero(picture.max(axis=0) > 0.05)
        assert 0.3 * 64 < len(lit) < 0.8 * 64
        rows = (picture > 0.05).sum(axis=0)
        sides.add(bool(rows[lit[0]] > rows[lit[-1]]))
    assert sides == {True, False}, "left and right breasts"


def test_a_breast_with_a_lesion_is_brighter_where_the_lesion_is() -> None:
    for seed in range(12):
        breast = random_breast(np.random.default_rng(seed), malignant=True)
        assert breast.masses or breast.grains
        bare = dataclasses.replace(breast, masses=(), grains=())
        with_it, without = (render(one, np.random.default_rng(99), 128) for one in (breast, bare))
        added = with_it - without
        assert added.min() > -1e-6
        assert added.max() > 0.02
        assert (added > 0.01).mean() < 0.25, "it is a small part of the picture"


def test_benign_breasts_have_masses_too_but_none_with_spicules() -> None:
    breasts = [random_breast(np.random.default_rng(s), malignant=False) for s in range(400)]
    with_mass = [breast for breast in breasts if breast.masses]
    assert len(with_mass) == pytest.approx(100, abs=30)
    assert not any(mass.spicules for breast in with_mass for mass in breast.masses)
    assert sum(bool(breast.grains) for breast in breasts) == pytest.approx(80, abs=30)
    bad = [random_breast(np.random.default_rng(s), malignant=True) for s in range(400)]
    assert all(mass.spicules for breast in bad for mass in breast.masses)
    assert sum(len(breast.masses) == 0 for breast in bad) == pytest.approx(80, abs=30)


def test_malignancy_can_be_told_but_not_always() -> None:
    from sklearn.metrics import roc_auc_score

    def brightest(number: int) -> float:
        """Return how far the brightest place stands out from the breast around it."""
        picture = phantom_mammogram("hologic", number, 32, profile=False)
        smooth = picture.reshape(16, 2, 16, 2).mean(axis=(1, 3))
        return float(np.quantile(smooth, 0.99) - np.median(smooth[smooth > 0.1]))

    labels = PLAN.sequence("hologic")[0][:240]
    found = [brightest(number) for number in range(240)]
    assert 0.55 < roc_auc_score(labels, found) < 0.95


def test_vendors_render_in_ways_of_their_own_unless_profiles_are_off(places: Places) -> None:
    plain = dataclasses.replace(PHANTOM, intensity_profiles=False)
    shifts = {}
    for site in SITES:
        index = MAMMOGRAPHY_PHANTOM.index(site, PHANTOM, places).take(np.arange(6))
        rendered = MAMMOGRAPHY_PHANTOM.decode(index, 32, PHANTOM).images.astype(float)
        bare = MAMMOGRAPHY_PHANTOM.decode(index, 32, plain).images.astype(float)
        shifts[site] = (rendered - bare).mean() / 65535
    assert shifts["siemens"] < shifts["hologic"] - 0.01
    assert shifts["siemens"] < -0.05
    assert shifts["ge"] > 0.05


def test_a_silo_needs_no_files_and_keeps_a_patient_on_one_side(places: Places) -> None:
    settings = dataclasses.replace(PHANTOM, val_folds=8)
    silo = load_silo("hologic", settings, places)
    assert (silo.classes, silo.distribution) == (("not-malignant", "malignant"), "hologic")
    assert (silo.task.input_shape, silo.train.inputs.dtype) == ((1, 32, 32), torch.int16)
    sizes = [len(split) for split in silo.splits().values()]
    assert sum(sizes) == 73
    assert sizes[2] == pytest.approx(73 / 5, abs=2)
    index = MAMMOGRAPHY_PHANTOM.index("hologic", settings, places)
    images = MAMMOGRAPHY_PHANTOM.decode(index, 32, settings).images
    patient = {image.tobytes(): group for image, group in zip(images, index.groups, strict=True)}
    sides = [{patient[p.numpy().tobytes()] for p in s.inputs} for s in silo.splits().values()]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(sides, 2))
    again = load_silo("hologic", settings, Places(None, places.cache / "other"))
    assert again.fingerprints == silo.fingerprints


def test_an_image_is_what_it_was_when_it_was_last_looked_at() -> None:
    # Images that change need another _GENERATOR, or caches of the old ones are read. Means of
    # quarters, since a pixel may be rounded otherwise on another machine.
    images = np.stack([phantom_mammogram(site, 3, 32) for site in SITES])
    quarters = images.reshape(3, 2, 16, 2, 16).mean(axis=(2, 4)).reshape(3, 4)
    seen = [
        [0.0880, 0.0055, 0.0865, 0.0063],
        [0.0611, 0.0020, 0.0446, 0.0020],
        [0.3185, 0.0739, 0.2674, 0.0445],
    ]
    assert np.abs(quarters - seen).max() < 0.003
