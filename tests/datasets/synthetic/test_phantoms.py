import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.decoding import shades_of_grey
from fedsilo.datasets.radiographs.masked_images import load_masked_silo
from fedsilo.datasets.registry import check_data_settings, load_silo, silo_names
from fedsilo.datasets.synthetic.phantom import PhantomDataSet
from fedsilo.datasets.synthetic.phantoms import (
    ANATOMIES,
    ANGIOGRAM_PHANTOM,
    DERMOSCOPY_PHANTOM,
    LESION_COUNTS,
    MAMMOGRAPHY_PHANTOM,
    phantom_frame,
)
from tests.support.errors import refuses

SMALL = CommonSettings(image_size=16, sample_share=0.01, val_folds=3)
PHANTOMS: list[PhantomDataSet] = [DERMOSCOPY_PHANTOM, MAMMOGRAPHY_PHANTOM, ANGIOGRAM_PHANTOM]
every_phantom = pytest.mark.parametrize("data", PHANTOMS, ids=lambda data: data.name)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(None, tmp_path / "cache")


def settings_of(data: PhantomDataSet, **changes: object) -> CommonSettings:
    return dataclasses.replace(SMALL, dataset=data.name, **changes)  # type: ignore[arg-type]


@every_phantom
def test_sites_have_the_papers_sizes_and_class_counts(data: PhantomDataSet, places: Places) -> None:
    whole = settings_of(data, sample_share=1.0, target="diagnosis")
    assert silo_names(whole) == list(data.counts)
    for place, (site, counts) in enumerate(data.counts.items()):
        labels = data.index(site, whole, places).labels
        first = 3 * place if data is ANGIOGRAM_PHANTOM else 0
        assert np.bincount(labels - first, minlength=len(counts)).tolist() == list(counts)


@every_phantom
@pytest.mark.parametrize("share", [0.001, 0.1, 0.5])
def test_a_sample_has_the_sites_proportions_and_the_fewest_images(
    data: PhantomDataSet, share: float, places: Places
) -> None:
    sampled = settings_of(data, sample_share=share, target="diagnosis")
    for place, (site, counts) in enumerate(data.counts.items()):
        labels = data.index(site, sampled, places).labels
        assert len(labels) == max(data.fewest, round(share * sum(counts)))
        first = 3 * place if data is ANGIOGRAM_PHANTOM else 0
        found = np.bincount(labels - first, minlength=len(counts))
        assert found == pytest.approx(np.array(counts) * len(labels) / sum(counts), abs=4)


@every_phantom
def test_a_subject_is_shown_again_at_once_or_never(data: PhantomDataSet) -> None:
    for site in data.counts:
        kinds, subjects = map(np.array, data.sequence(site))
        again = subjects[1:] == subjects[:-1]
        assert again.mean() == pytest.approx(data.again, abs=0.08)
        assert (np.diff(subjects) <= 1).all()
        assert (kinds[1:][again] == kinds[:-1][again]).all()


@every_phantom
def test_an_image_is_the_same_each_time_and_unlike_all_others(data: PhantomDataSet) -> None:
    def made() -> list[np.ndarray]:
        sites = itertools.product(data.counts, range(6))
        return [data.image(site, number, 16, settings_of(data)) for site, number in sites]

    torch.manual_seed(1)
    np.random.seed(1)  # whatever the global generators
    images, again = made(), made()
    assert all((a == b).all() for a, b in zip(images, again, strict=True))
    assert len({image.tobytes() for image in images}) == len(images)
    shape = (data.channels, 16, 16)
    assert {(image.shape, image.dtype) for image in images} == {(shape, np.dtype(data.dtype))}


@every_phantom
def test_the_size_only_decides_how_finely_an_image_is_sampled(data: PhantomDataSet) -> None:
    plain = settings_of(data, intensity_profiles=False)
    for site, number in itertools.product(data.counts, range(3)):
        large, small = (data.image(site, number, size, plain).astype(float) for size in (256, 64))
        pooled = large.reshape(-1, 64, 4, 64, 4).mean(axis=(2, 4))
        assert (
            np.corrcoef(pooled.ravel(), small.ravel())[0, 1] > 0.6
        )  # the noise is each pixel's own


@every_phantom
def test_a_subject_is_on_one_side_of_the_split(data: PhantomDataSet, places: Places) -> None:
    settings = settings_of(data, sample_share=0.05)
    site = list(data.counts)[1]
    silo, index = load_silo(site, settings, places), data.index(site, settings, places)
    assert (silo.distribution, silo.dropped) == (site, 0)
    assert silo.classes == tuple(data.classes(settings, places))
    images = data.decode(index, 16, settings).images
    subject = {image.tobytes(): group for image, group in zip(images, index.groups, strict=True)}
    sides = [{subject[p.numpy().tobytes()] for p in s.inputs} for s in silo.splits().values()]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(sides, 2))
    assert set().union(*sides) == set(index.groups)
    elsewhere = load_silo(site, settings, Places(None, places.cache / "other"))
    assert elsewhere.fingerprints == silo.fingerprints


@every_phantom
def test_classes_are_learnt_at_one_site(data: PhantomDataSet) -> None:
    from sklearn.ensemble import RandomForestClassifier

    site = next(iter(data.counts))
    kinds = np.array(data.sequence(site)[0][:400])
    images = np.stack([data.image(site, n, 16, settings_of(data)).ravel() for n in range(400)])
    forest = RandomForestClassifier(100, class_weight="balanced", random_state=0)
    found = forest.fit(images[:300], kinds[:300]).predict(images[300:])
    assert (found == kinds[300:]).mean() > 0.8


@every_phantom
def test_sites_look_different(data: PhantomDataSet) -> None:
    means = [
        np.mean([data.image(site, n, 16, settings_of(data)) for n in range(20)], axis=(0, 2, 3))
        for site in data.counts
    ]
    step = 5 if data.dtype is np.uint8 else 1000
    assert all(np.abs(a - b).max() > step for a, b in itertools.combinations(means, 2))


def test_target_changes_a_lesions_label_and_nothing_else(places: Places) -> None:
    nevus, eight = (
        DERMOSCOPY_PHANTOM.index("msk4", settings_of(DERMOSCOPY_PHANTOM, target=target), places)
        for target in ("nevus", "diagnosis")
    )
    assert (nevus.labels == (eight.labels == 1)).all()
    assert nevus.names == eight.names
    assert len(LESION_COUNTS["msk4"]) == 8


def test_colour_constancy_is_applied_to_made_up_images() -> None:
    plain, corrected = (
        DERMOSCOPY_PHANTOM.image("bcn", 3, 16, settings_of(DERMOSCOPY_PHANTOM, colour_constancy=on))
        for on in (False, True)
    )
    assert (corrected == shades_of_grey(plain)).all()


def test_vendors_render_by_profiles_unless_they_are_off() -> None:
    shifts = {}
    for site in MAMMOGRAPHY_PHANTOM.counts:
        plain, rendered = (
            MAMMOGRAPHY_PHANTOM.image(
                site, 2, 32, settings_of(MAMMOGRAPHY_PHANTOM, intensity_profiles=on)
            ).astype(float)
            for on in (False, True)
        )
        shifts[site] = (rendered - plain).mean() / 65535
    assert shifts["siemens"] < -0.02
    assert shifts["ge"] > 0.02


def test_masked_silo_has_the_same_frames_in_the_same_parts(places: Places) -> None:
    settings = settings_of(ANGIOGRAM_PHANTOM, sample_share=0.1)
    silo, masked = load_silo("human", settings, places), load_masked_silo("human", settings, places)
    assert (masked.name, masked.classes) == ("human", ("background", "catheter"))
    frames = (phantom_frame("human", n, 16) for n in range(44))
    made = {image.tobytes(): mask.tobytes() for image, mask in frames}
    for part, own in silo.splits().items():
        assert torch.equal(masked.splits()[part].inputs, own.inputs)
        for image, mask in zip(own.inputs, masked.splits()[part].labels, strict=True):
            assert made[image.numpy().tobytes()] == mask.numpy().tobytes()


def test_mask_is_thin_where_the_catheter_is_and_empty_in_an_eighth_of_the_frames() -> None:
    frames = [phantom_frame("simulation", n, 64) for n in range(120)]
    with_catheter = [(image, mask) for image, mask in frames if mask.any()]
    assert 1 - len(with_catheter) / 120 == pytest.approx(0.12, abs=0.08)
    for image, mask in with_catheter:  # simulated ones are bright
        assert image[mask > 0].mean() > image[mask == 0].mean() + 60
        assert mask.mean() < 0.08


def test_nothing_is_marked_outside_a_round_field() -> None:
    for number in range(12):
        image, mask = phantom_frame("human", number, 64)
        assert image[:2, :2].max() < 5
        assert not mask[:3, :3].any()


def test_frames_of_a_sequence_share_their_vessels() -> None:
    subjects = ANGIOGRAM_PHANTOM.sequence("silicone")[1]
    pairs = [n for n in range(1, 60) if subjects[n] == subjects[n - 1]]
    others = [n for n in range(1, 60) if subjects[n] != subjects[n - 1]]

    def alike(number: int) -> float:
        one, other = (phantom_frame("silicone", n, 32)[0].ravel() for n in (number - 1, number))
        return float(np.corrcoef(one, other)[0, 1])

    assert np.median([alike(n) for n in pairs]) > np.median([alike(n) for n in others]) + 0.3


def test_masked_frames_come_from_the_cache_the_second_time(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(ANGIOGRAM_PHANTOM)
    first = load_masked_silo("animal", settings, places)

    def never(*_: object) -> None:
        raise AssertionError("it is made again")

    monkeypatch.setattr("fedsilo.datasets.synthetic.phantoms.phantom_frame", never)
    assert torch.equal(
        load_masked_silo("animal", settings, places).train.labels, first.train.labels
    )


def test_an_unknown_site_is_answered_with_the_known_ones(places: Places) -> None:
    said = "no silo 'robot': 4 silos are human, animal, silicone, simulation"
    for load in (load_silo, load_masked_silo):
        with pytest.raises(DataError, match=said):
            load("robot", settings_of(ANGIOGRAM_PHANTOM), places)


def test_settings_for_colours_or_files_are_refused_for_angiograms() -> None:
    check_data_settings(settings_of(ANGIOGRAM_PHANTOM))
    for changed in ({"colour_constancy": True}, {"broken_images": "skip"}):
        with refuses(SettingError, "angiogram-phantom"):
            check_data_settings(settings_of(ANGIOGRAM_PHANTOM, **changed))


def test_images_are_those_of_this_version() -> None:
    # Images that change need another ``version``, or caches of the old ones are read. Means alone,
    # since a pixel may be rounded otherwise on another machine.
    seen = {
        "dermoscopy-phantom": [155.9, 156.7],
        "mammography-phantom": [-27351.7, -30177.3],
        "angiogram-phantom": [89.1, 191.5],
    }
    for data in PHANTOMS:
        plain = settings_of(data)
        found = [data.image(site, 3, 16, plain).mean() for site in list(data.counts)[:2]]
        assert found == pytest.approx(seen[data.name], abs=1 if data.dtype is np.uint8 else 200)


def test_anatomies_are_the_three_of_the_classes() -> None:
    assert ANATOMIES == ("arch", "carotid", "coronary")
