from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsilo.datasets.io.locations import Places
from fedsilo.datasets.radiographs.masks import load_masked_silo
from fedsilo.datasets.registry import check_data_settings, load_silo, silo_names
from fedsilo.datasets.synthetic.angiogram_phantom import (
    ANGIOGRAM_PHANTOM,
    CLASSES,
    COUNTS,
    PLAN,
    phantom_frame,
)
from fedsilo.models.contract.errors import DataError, SettingError
from fedsilo.models.contract.settings import CommonSettings

PHANTOM = CommonSettings(dataset="angiogram-phantom", image_size=16, sample_share=0.1)
SITES = ["human", "animal", "silicone", "simulation"]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(None, tmp_path / "cache")


def test_each_source_has_three_classes_that_no_other_has(places: Places) -> None:
    assert silo_names(PHANTOM) == SITES
    assert CLASSES[:4] == ("human-arch", "human-carotid", "human-coronary", "animal-arch")
    whole = dataclasses.replace(PHANTOM, sample_share=1.0)
    for place, site in enumerate(SITES):
        labels = ANGIOGRAM_PHANTOM.index(site, whole, places).labels
        counts = np.bincount(labels, minlength=12)
        assert counts[3 * place : 3 * place + 3].tolist() == list(COUNTS[site])
        assert counts.sum() == sum(COUNTS[site])


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5])
def test_a_sample_has_the_sources_proportions_and_at_least_twelve_frames(
    places: Places, share: float
) -> None:
    for site, counts in COUNTS.items():
        sampled = dataclasses.replace(PHANTOM, sample_share=share)
        index = ANGIOGRAM_PHANTOM.index(site, sampled, places)
        assert len(index) == max(12, round(share * sum(counts)))
        found = np.bincount(index.labels % 3, minlength=3)
        assert found == pytest.approx(np.array(counts) * len(index) / sum(counts), abs=4)


def test_a_third_of_the_frames_are_of_the_sequence_of_the_one_before() -> None:
    for site in SITES:
        anatomies, sequences = map(np.array, PLAN.sequence(site))
        again = sequences[1:] == sequences[:-1]
        assert again.mean() == pytest.approx(0.35, abs=0.08)
        assert (sequences[1:] - sequences[:-1]).max() == 1  # a sequence does not come back
        assert (anatomies[1:][again] == anatomies[:-1][again]).all()


def test_a_frame_is_the_same_each_time_and_no_other_is_like_it() -> None:
    torch.manual_seed(1)
    np.random.seed(1)  # whatever the global generators
    made = [phantom_frame(site, n, 32) for site in SITES for n in range(5)]
    again = [phantom_frame(site, n, 32) for site in SITES for n in range(5)]
    for one, other in zip(made, again, strict=True):
        assert all((a == b).all() for a, b in zip(one, other, strict=True))
    assert len({image.tobytes() for image, _ in made}) == len(made)


def test_a_silo_needs_no_files_and_keeps_a_sequence_on_one_side(places: Places) -> None:
    settings = dataclasses.replace(PHANTOM, val_folds=3)
    silo = load_silo("human", settings, places)
    assert (silo.classes, silo.distribution, silo.dropped) == (CLASSES, "human", 0)
    assert (silo.task.input_shape, silo.task.classes) == ((1, 16, 16), 12)
    assert silo.train.inputs.dtype == torch.uint8
    index = ANGIOGRAM_PHANTOM.index("human", settings, places)
    sequence = {
        phantom_frame("human", n, 16)[0].tobytes(): group for n, group in enumerate(index.groups)
    }
    sides = [{sequence[p.numpy().tobytes()] for p in s.inputs} for s in silo.splits().values()]
    assert all(sides)
    assert all(a.isdisjoint(b) for a in sides for b in sides if a is not b)
    assert set().union(*sides) == set(index.groups)


@pytest.mark.parametrize("site", SITES)
def test_the_masked_silo_has_the_same_frames_in_the_same_parts(places: Places, site: str) -> None:
    settings = dataclasses.replace(PHANTOM, val_folds=3)
    silo, masked = load_silo(site, settings, places), load_masked_silo(site, settings, places)
    assert (masked.name, masked.classes) == (site, ("background", "catheter"))
    for part, own in silo.splits().items():
        assert torch.equal(masked.splits()[part].inputs, own.inputs)
    masks = torch.cat([part.masks for part in masked.splits().values()])
    images = torch.cat([part.inputs for part in masked.splits().values()])
    assert (masks.shape, masks.dtype) == ((len(images), 16, 16), torch.uint8)
    assert set(masks.flatten().tolist()) == {0, 1}
    made = (phantom_frame(site, n, 16) for n in range(len(images)))
    painted = {image.tobytes(): mask.tobytes() for image, mask in made}
    for image, mask in zip(images, masks, strict=True):
        assert painted[image.numpy().tobytes()] == mask.numpy().tobytes()


def test_masks_come_from_the_cache_the_second_time(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_masked_silo("animal", PHANTOM, places)

    def never(*_: object) -> None:
        raise AssertionError("it is painted again")

    monkeypatch.setattr("fedsilo.datasets.synthetic.angiogram_phantom.render", never)
    assert torch.equal(load_masked_silo("animal", PHANTOM, places).train.masks, first.train.masks)


def test_the_own_size_is_64_pixels(places: Places) -> None:
    own = dataclasses.replace(PHANTOM, image_size=0, sample_share=0.001)
    assert load_silo("human", own, places).task.input_shape == (1, 64, 64)


def test_an_unknown_source_is_answered_with_the_four(places: Places) -> None:
    said = "no silo 'robot': 4 silos are human, animal, silicone, simulation"
    with pytest.raises(DataError, match=said):
        load_silo("robot", PHANTOM, places)
    with pytest.raises(DataError, match=said):
        load_masked_silo("robot", PHANTOM, places)


def test_what_needs_colours_or_files_is_refused() -> None:
    check_data_settings(PHANTOM)
    coloured = dataclasses.replace(PHANTOM, colour_constancy=True)
    for changed in (coloured, dataclasses.replace(PHANTOM, broken_images="skip")):
        with pytest.raises(SettingError, match="means nothing to data set 'angiogram-phantom'"):
            check_data_settings(changed)


def test_classes_can_be_learnt_but_not_by_single_pixels() -> None:
    from sklearn.linear_model import RidgeClassifier

    images, labels = [], []
    for place, site in enumerate(SITES):
        for number in range(90):
            images.append(phantom_frame(site, number, 16)[0].ravel() / 255)
            labels.append(3 * place + PLAN.sequence(site)[0][number])
    pixels, wanted = np.stack(images), np.array(labels)
    held = np.arange(360) % 90 >= 60
    found = RidgeClassifier(10).fit(pixels[~held], wanted[~held]).predict(pixels[held])
    assert 0.3 < (found == wanted[held]).mean() < 0.9
    assert (found // 3 == wanted[held] // 3).mean() > 0.7


def test_frames_are_what_they_were_when_they_were_last_looked_at() -> None:
    # Images that change need another _GENERATOR, or caches of the old ones are read. Quarters,
    # since a pixel may be rounded otherwise on another machine.
    found = [phantom_frame(site, 5, 16) for site in SITES]
    quarters = np.stack([image.reshape(2, 8, 2, 8).mean(axis=(1, 3)).ravel() for image, _ in found])
    seen = [
        [148.5, 144.9, 119.5, 97.0],
        [222.1, 216.7, 212.3, 206.4],
        [222.0, 211.0, 216.2, 213.1],
        [74.5, 74.9, 91.4, 92.9],
    ]
    assert np.abs(quarters - seen).max() < 1
    assert [int(mask.sum()) for _, mask in found] == [22, 27, 11, 31]
