from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsilo.datasets.images.decoding import shades_of_grey
from fedsilo.datasets.images.isic2019 import CENTRES, DIAGNOSES
from fedsilo.datasets.io.locations import Places
from fedsilo.datasets.registry import load_silo, silo_names
from fedsilo.datasets.synthetic.dermoscopy_phantom import (
    COUNTS,
    DERMOSCOPY_PHANTOM,
    PLAN,
    phantom_image,
)
from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.settings import CommonSettings

PHANTOM = CommonSettings(dataset="dermoscopy-phantom", image_size=32, sample_share=0.01)
SIZES = {
    "bcn": 12413,
    "vidir_molemax": 3954,
    "vidir_modern": 3363,
    "rosendahl": 2259,
    "msk4": 819,
    "vienna_dias": 439,
}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(None, tmp_path / "cache")


def test_the_six_centres_have_the_real_sizes_and_counts(places: Places) -> None:
    assert silo_names(PHANTOM) == list(SIZES)
    whole = dataclasses.replace(PHANTOM, sample_share=1.0, target="diagnosis")
    for site, size in SIZES.items():
        index = DERMOSCOPY_PHANTOM.index(site, whole, places)
        assert len(index) == size
        assert tuple(np.bincount(index.labels, minlength=8)) == COUNTS[site]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.37])
def test_a_sample_has_the_centres_proportions_and_at_least_eight_images(
    places: Places, share: float
) -> None:
    sampled = dataclasses.replace(PHANTOM, sample_share=share, target="diagnosis")
    for site, size in SIZES.items():
        index = DERMOSCOPY_PHANTOM.index(site, sampled, places)
        assert len(index) == max(8, round(share * size))
        counts = np.bincount(index.labels, minlength=8)
        assert counts == pytest.approx(np.array(COUNTS[site]) * len(index) / size, abs=4)


def test_some_images_show_the_lesion_of_the_one_before() -> None:
    for site in CENTRES:
        diagnoses, lesions = map(np.array, PLAN.sequence(site))
        again = lesions[1:] == lesions[:-1]
        assert again.mean() == pytest.approx(0.15, abs=0.05)
        assert (lesions[1:] - lesions[:-1]).max() == 1  # a lesion does not come back
        assert (diagnoses[1:][again] == diagnoses[:-1][again]).all()


def test_two_views_of_a_lesion_are_more_alike_than_two_lesions() -> None:
    diagnoses, lesions = PLAN.sequence("bcn")
    nevi = [i for i in range(1, 1500) if diagnoses[i] == 1]
    pairs = [i for i in nevi if lesions[i] == lesions[i - 1]][:30]

    def distance(one: int, other: int) -> float:
        means = [phantom_image("bcn", i, 32)[:, 8:24, 8:24].mean(axis=(1, 2)) for i in (one, other)]
        return float(np.abs(means[0] - means[1]).mean())

    views = [distance(i - 1, i) for i in pairs]
    others = [distance(i, j) for i, j in itertools.pairwise(pairs)]
    assert min(views) > 0
    assert np.median(views) < 0.7 * np.median(others)


def test_an_image_is_the_same_each_time_and_no_other_is_like_it() -> None:
    torch.manual_seed(1)
    np.random.seed(1)  # whatever the global generators
    images = [phantom_image(site, i, 32) for site in CENTRES for i in range(5)]
    again = [phantom_image(site, i, 32) for site in CENTRES for i in range(5)]
    assert all((a == b).all() for a, b in zip(images, again, strict=True))
    assert len({image.tobytes() for image in images}) == len(images)
    assert {(image.shape, image.dtype.name) for image in images} == {((3, 32, 32), "uint8")}


def test_the_size_only_decides_how_finely_an_image_is_sampled() -> None:
    for number in range(6):
        large = phantom_image("rosendahl", number, 256)
        pooled = large.reshape(3, 32, 8, 32, 8).mean(axis=(2, 4))
        small = phantom_image("rosendahl", number, 32)
        assert np.abs(pooled - small).mean() < 8
        assert np.corrcoef(pooled.ravel(), small.ravel())[0, 1] > 0.9


def test_centres_have_colours_and_light_of_their_own() -> None:
    tints, corners = {}, {}
    for site in CENTRES:
        images = np.stack([phantom_image(site, i, 32) for i in range(40)]).astype(float)
        middle = images.mean(axis=(0, 2, 3))
        tints[site] = middle[0] / middle[2]
        corners[site] = images[:, :, :2, :2].mean() / images.mean()
    assert max(tints.values()) > 1.4 * min(tints.values())
    black = {site for site, light in corners.items() if light < 0.3}  # beyond the tube
    assert black == {"bcn", "vienna_dias"}
    assert min(light for site, light in corners.items() if site not in black) > 0.8


def test_diagnoses_differ_in_colour_but_not_always() -> None:
    diagnoses, _ = PLAN.sequence("bcn")
    middles = {}
    for name in ("MEL", "NV", "BCC", "VASC"):
        numbers = [i for i, d in enumerate(diagnoses) if DIAGNOSES[d] == name][:60]
        centres = [phantom_image("bcn", i, 32)[:, 12:20, 12:20] for i in numbers]
        middles[name] = np.array(centres, dtype=float).reshape(60, 3, 64)
    red = {name: (found[:, 0] - found[:, 1]).mean(axis=1) for name, found in middles.items()}
    light = {name: found.mean(axis=(1, 2)) for name, found in middles.items()}
    many = {name: found.std(axis=2).mean(axis=1) for name, found in middles.items()}
    for amount, more, less in (
        (red, "VASC", "NV"),
        (light, "BCC", "NV"),
        (many, "MEL", "NV"),
    ):
        assert np.median(amount[more]) > 1.2 * np.median(amount[less])
        assert amount[more].min() < amount[less].max()


def test_nevi_can_be_told_from_the_others_but_not_all_of_them() -> None:
    from sklearn.ensemble import RandomForestClassifier

    diagnoses, _ = PLAN.sequence("rosendahl")
    images = np.stack([phantom_image("rosendahl", i, 16).ravel() for i in range(400)])
    nevus = np.array(diagnoses[:400]) == 1
    forest = RandomForestClassifier(60, class_weight="balanced", random_state=0)
    found = forest.fit(images[:300], nevus[:300]).predict(images[300:])
    rates = [(found[nevus[300:] == which] == which).mean() for which in (False, True)]
    assert 0.65 < np.mean(rates) < 0.99


def test_a_silo_needs_no_files_and_keeps_a_lesion_on_one_side(places: Places) -> None:
    settings = dataclasses.replace(PHANTOM, val_folds=3)
    silo = load_silo("bcn", settings, places)
    assert (silo.classes, silo.distribution, silo.dropped) == (("other", "nevus"), "bcn", 0)
    assert (silo.task.input_shape, silo.train.inputs.dtype) == ((3, 32, 32), torch.uint8)
    sizes = [len(split) for split in silo.splits().values()]
    assert sum(sizes) == 124
    assert sizes[2] == pytest.approx(31, abs=3)
    index = DERMOSCOPY_PHANTOM.index("bcn", settings, places)
    lesion = {phantom_image("bcn", i, 32).tobytes(): group for i, group in enumerate(index.groups)}
    sides = [{lesion[p.numpy().tobytes()] for p in s.inputs} for s in silo.splits().values()]
    assert all(a.isdisjoint(b) for a in sides for b in sides if a is not b)
    assert set().union(*sides) == set(index.groups)
    again = load_silo("bcn", settings, Places(None, places.cache / "other"))
    assert again.fingerprints == silo.fingerprints


def test_the_target_only_changes_the_labels(places: Places) -> None:
    for target, classes in (("nevus", 2), ("diagnosis", 8)):
        silo = load_silo("msk4", dataclasses.replace(PHANTOM, target=target), places)
        assert silo.task.classes == len(silo.classes) == classes
        assert sum(sum(counts) for counts in silo.label_counts().values()) == 8
    nevus, eight = (
        DERMOSCOPY_PHANTOM.index("msk4", dataclasses.replace(PHANTOM, target=target), places)
        for target in ("nevus", "diagnosis")
    )
    assert (nevus.labels == (eight.labels == 1)).all()
    assert nevus.names == eight.names


def test_colour_constancy_is_applied_to_made_up_images_too(places: Places) -> None:
    silo = load_silo("msk4", dataclasses.replace(PHANTOM, colour_constancy=True), places)
    found = {p.numpy().tobytes() for split in silo.splits().values() for p in split.inputs}
    assert found == {shades_of_grey(phantom_image("msk4", i, 32)).tobytes() for i in range(8)}


def test_an_unknown_centre_is_answered_with_the_six(places: Places) -> None:
    with pytest.raises(DataError, match="no silo 'basel': 6 silos are bcn, vidir_molemax"):
        load_silo("basel", PHANTOM, places)


def test_two_images_are_what_they_were_when_they_were_last_looked_at() -> None:
    # Images that change need another _GENERATOR, or caches of the old ones are read. Quarters of
    # each channel, since a pixel may be rounded otherwise on another machine.
    images = np.stack([phantom_image(site, 3, 16) for site in ("bcn", "vienna_dias")])
    quarters = images.reshape(6, 2, 8, 2, 8).mean(axis=(2, 4)).reshape(6, 4)
    seen = [
        [195, 186, 196, 198],
        [156, 145, 158, 162],
        [122, 113, 124, 127],
        [152, 157, 164, 155],
        [95, 98, 104, 95],
        [60, 60, 66, 59],
    ]
    assert np.abs(quarters - seen).max() < 1
