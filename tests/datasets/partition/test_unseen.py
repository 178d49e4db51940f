import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.core.settings_schema import Value, build
from fedsilo.datasets.partition.cuts import cut_names, load_cut
from fedsilo.datasets.partition.label_sets import label_sets
from fedsilo.datasets.registry import check_data_settings, load_silo, silo_count, silo_names
from fedsilo.datasets.silo.silos import SPLITS, DataSet, Silo, Split
from fedsilo.models.networks.kinds import NetworkShape
from tests.support.colour import ppm, write_gtsrb
from tests.support.errors import refuses

SMALL = CommonSettings(
    dataset="mnist",
    partition="unseen",
    silos=5,
    silo_train_size=30,
    silo_test_size=10,
    pixel_scale="raw",
)
DIGITS = CommonSettings(dataset="digits", partition="unseen", silos=3)


def _all(places: Places | None, settings: CommonSettings) -> list[Silo]:
    return [load_silo(name, settings, places) for name in silo_names(settings)]


def _numbers(split: Split) -> list[int]:
    """Return which image of ``small_places`` each is."""
    return [round(value) for value in split.inputs[:, 0, 8, 8].tolist()]


def test_silos_are_numbered_so_that_they_sort() -> None:
    assert cut_names(DIGITS) == ["silo-1", "silo-2", "silo-3"]
    names = cut_names(dataclasses.replace(DIGITS, silos=10))
    assert names[0] == "silo-01"
    assert names == sorted(names)


def test_a_silo_set_names_and_counts_the_silos(tmp_path: Path) -> None:
    gaia = CommonSettings(dataset="digits", partition="unseen", silo_set="gaia", unseen=0.0)
    assert silo_names(gaia)[0] == "virginia"
    assert silo_count(gaia) == 11
    check_data_settings(gaia)
    check_data_settings(dataclasses.replace(gaia, silos=11))
    with refuses(SettingError, "silos", "5", "gaia", "11"):
        check_data_settings(dataclasses.replace(gaia, silos=5))
    (tmp_path / "three.csv").write_text("site,neighbour\nb,a\na,c\n")
    three = dataclasses.replace(gaia, silo_set=str(tmp_path / "three.csv"))
    assert silo_names(three) == ["b", "a", "c"]
    with refuses(DataError, "gaia"):
        check_data_settings(dataclasses.replace(gaia, silo_set="gaya"))


def test_at_1_silos_train_on_their_own_labels_and_test_on_all(small_places: Places) -> None:
    for index, silo in enumerate(_all(small_places, SMALL)):
        held = sorted(set(silo.train.labels.tolist()))
        assert held == [2 * index, 2 * index + 1]
        numbers = _numbers(silo.train)
        assert numbers == sorted(numbers)
        for label in held:  # the first images of it in the file, a half of 27
            own = [number for number in numbers if number % 10 == label]
            assert own == [10 * place + label for place in range(len(own))]
            assert len(own) in (13, 14)
        assert silo.train.labels.tolist() == [number % 10 for number in numbers]
        assert len(silo.val) == 3
        assert _numbers(silo.test) == [200 + 10 * index + label for label in range(10)]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_no_image_is_at_two_silos_or_in_two_parts(small_places: Places, share: float) -> None:
    settings = dataclasses.replace(SMALL, unseen=share, silo_train_size=20)
    silos = _all(small_places, settings)
    held = [number for silo in silos for part in SPLITS for number in _numbers(silo.splits()[part])]
    assert len(held) == len(set(held)) == 5 * 30
    assert all(number >= 200 for silo in silos for number in _numbers(silo.test))
    assert all(number < 200 for silo in silos for number in _numbers(silo.val))
    sets = label_sets(10, 5, share)
    assert [set(silo.train.labels.tolist()) for silo in silos] == [set(labels) for labels in sets]


def test_validation_images_are_of_all_labels_whatever_a_silo_holds() -> None:
    settings = dataclasses.replace(DIGITS, silos=5, silo_train_size=200, silo_test_size=50)
    for silo in _all(None, settings):
        assert silo.label_counts()["val"] == [2] * 10
        assert silo.label_counts()["test"] == [5] * 10
        assert sorted(silo.label_counts()["train"]) == [0] * 8 + [90, 90]


def test_a_silo_is_tested_on_the_same_images_whatever_the_share(small_places: Places) -> None:
    settings = dataclasses.replace(SMALL, silo_train_size=20)
    cuts = [dataclasses.replace(settings, unseen=share) for share in (1.0, 0.5, 0.0)]
    found = [load_silo("silo-2", cut, small_places).fingerprints for cut in cuts]
    assert len({one["test"] for one in found}) == len({one["val"] for one in found}) == 1
    assert len({one["train"] for one in found}) == 3


def test_silos_are_of_one_distribution_and_say_what_they_hold(small_places: Places) -> None:
    silo = load_silo("silo-2", SMALL, small_places)
    assert (silo.name, silo.distribution) == ("silo-2", "unseen")
    assert (silo.shape.input_shape, silo.shape.outputs) == ((1, 16, 16), 10)
    assert (silo.train.inputs.dtype, silo.train.labels.dtype) == (torch.float32, torch.int64)


def test_images_are_not_rotated_and_standardised_as_those_of_the_first_distribution(
    small_places: Places,
) -> None:
    raw = load_silo("silo-1", SMALL, small_places).train.inputs
    settings = dataclasses.replace(SMALL, pixel_scale="standard")
    standard = load_silo("silo-1", settings, small_places).train.inputs
    assert torch.equal(standard, (raw / 255 - 0.1307) / 0.3081)
    assert torch.equal(raw, raw[:, :, :1, :1].expand_as(raw)), "flat images stay flat, unrotated"


def test_the_runs_seed_decides_nothing_and_the_cache_gives_the_same(small_places: Places) -> None:
    first = load_silo("silo-3", SMALL, small_places)
    other = load_silo("silo-3", dataclasses.replace(SMALL, seed=7, rounds=3), small_places)
    elsewhere = dataclasses.replace(small_places, cache=small_places.cache / "other")
    assert first.fingerprints == other.fingerprints
    assert first.fingerprints == load_silo("silo-3", SMALL, elsewhere).fingerprints
    assert len(list(small_places.cache.glob("mnist-unseen-silos/silo-3-*"))) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"unseen": 0.5, "silo_train_size": 20},
        {"silos": 4},
        {"silo_train_size": 29},
        {"pixel_scale": "standard"},
        {"dataset": "fmnist", "pixel_scale": "standard"},
        {"partition": "own"},
    ],
    ids=str,
)
def test_other_settings_make_other_silos(small_places: Places, change: dict[str, Any]) -> None:
    settings = dataclasses.replace(SMALL, **change)
    name, other = silo_names(SMALL)[1], silo_names(settings)[1]
    found = load_silo(name, SMALL, small_places).fingerprints
    assert load_silo(other, settings, small_places).fingerprints != found
    assert load_silo(name, SMALL, small_places).fingerprints == found


def test_an_unknown_silo_is_answered_with_the_known_ones(small_places: Places) -> None:
    with refuses(DataError, "s1a", "5"):
        load_silo("s1a", SMALL, small_places)


def test_too_few_images_are_refused_with_counts(small_places: Places) -> None:
    for change, says in (
        ({"silo_train_size": 50}, r"mnist, partition 'unseen': 5 silos of 50 training images"),
        ({"silo_train_size": 0}, "5 silos of 2000 training images"),
        ({"silo_test_size": 60}, "5 silos of 60 test images"),
    ):
        with pytest.raises(DataError, match=says):
            load_silo("silo-1", dataclasses.replace(SMALL, **change), small_places)  # type: ignore[arg-type]


PHANTOM = CommonSettings(
    dataset="dermoscopy-phantom",
    partition="unseen",
    target="nevus",
    silos=2,
    image_size=16,
    sample_share=0.01,
)


def test_pictures_of_all_sites_are_pooled_and_keep_their_parts() -> None:
    own = dataclasses.replace(PHANTOM, partition="own", silos=9)
    sites = _all(None, own)
    there = {part: {_bytes(x) for s in sites for x in s.splits()[part].inputs} for part in SPLITS}
    silos = _all(None, PHANTOM)
    for part, whence in (("train", "train"), ("val", "train"), ("test", "test")):
        held = [_bytes(x) for silo in silos for x in silo.splits()[part].inputs]
        assert len(held) == len(set(held)) > 0
        assert set(held) <= there[whence]
    assert [set(silo.train.labels.tolist()) for silo in silos] == [{0}, {1}]
    assert {silo.train.inputs.dtype for silo in silos} == {torch.uint8}
    assert {silo.schema for silo in silos} == {sites[0].schema}
    assert silos[0].classes == sites[0].classes
    assert silo_names(PHANTOM) == ["silo-1", "silo-2"]


def test_pictures_validate_on_their_own_validation_part_where_they_have_one() -> None:
    settings = dataclasses.replace(PHANTOM, val_folds=4, use_test=False, silo_test_size=8)
    own = dataclasses.replace(settings, partition="own", silos=9, silo_test_size=0)
    there = {_bytes(x) for site in _all(None, own) for x in site.val.inputs}
    silos = _all(None, settings)
    assert all({_bytes(x) for x in silo.val.inputs} <= there for silo in silos)
    assert all(silo.label_counts()["val"][0] == silo.label_counts()["val"][1] for silo in silos)
    assert [len(silo.test) for silo in silos] == [0, 0]


def _bytes(image: torch.Tensor) -> bytes:
    return image.numpy().tobytes()


class _Sites(DataSet):
    """Two sites; an image is its site's number and its own."""

    name = "sites"

    def silo_names(self, settings: CommonSettings, places: Places) -> list[str]:
        return ["one", "two"]

    def _load(self, name: str, settings: CommonSettings, places: Places) -> Silo:
        site, count = (1, 40) if name == "one" else (2, 20)
        numbers = torch.tensor([[site, number] for number in range(count)], dtype=torch.int16)
        # The first site's labels are sorted, the second's take turns
        labels = (numbers[:, 1] >= 20).long() if site == 1 else (numbers[:, 1] % 2).long()
        whole, empty = Split(numbers, labels), Split(numbers[:0], labels[:0])
        return Silo(name, name, NetworkShape((2,), 2), whole, empty, whole, fingerprints={})


def test_images_of_a_label_are_dealt_out_so_that_silos_get_as_many_of_each_site(
    tmp_path: Path,
) -> None:
    settings = dataclasses.replace(PHANTOM, unseen=0.0, silo_train_size=20, silo_test_size=20)
    places = Places(None, tmp_path)
    for name in ("silo-1", "silo-2"):
        silo = load_cut(_Sites(), name, settings, places)
        for split in (silo.train, silo.test):
            sites = np.bincount(split.inputs[:, 0].numpy())
            # Site one has two thirds of each label
            assert sites[1] / len(split) == pytest.approx(2 / 3, abs=0.1)
            one = split.inputs[:, 0] == 1
            assert torch.equal(split.labels[one], (split.inputs[one, 1] >= 20).long())
            assert torch.equal(split.labels[~one], (split.inputs[~one, 1] % 2).long())


@pytest.mark.parametrize("dataset", ["heart", "heart-synthetic", "table"])
def test_tables_are_not_cut_by_label(dataset: str) -> None:
    settings = CommonSettings(dataset=dataset, partition="unseen")
    with refuses(SettingError, dataset):
        check_data_settings(settings)
    with pytest.raises(SettingError, match="is a table"):
        load_silo("silo-1", settings)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dataset": "digits", "split.silos": 11}, ["unseen", 1, 10, 11]),
        ({"dataset": "digits", "split.silos": 5, "split.unseen": 0.75}, ["0.5", 1]),
        ({"dataset": "digits", "split.silos": 1}, [2, "split.silos"]),
        ({"dataset": "digits", "split.silo-set": "gaia"}, [10, 11]),
        ({"dataset": "mini-mias", "split.silos": 3}, [2, 3]),
        (
            {"dataset": "dermoscopy-phantom", "split.silos": 2, "data.pixel-scale": "raw"},
            ["data.pixel-scale"],
        ),
        ({"dataset": "fmnist", "split.silos": 5, "split.test-folds": 3}, ["split.test-folds"]),
    ],
)
def test_what_cannot_be_is_refused_before_data_are_read(
    values: dict[str, Value], says: list[object]
) -> None:
    with refuses(SettingError, *says):
        check_data_settings(build(CommonSettings, {"split.partition": "unseen", **values}))


def test_images_that_are_not_here_are_no_reason_to_refuse_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FEDSILO_DATA", raising=False)
    check_data_settings(CommonSettings(dataset="images", partition="unseen", silos=2))


def test_five_silos_of_the_real_fashion_mnist_hold_two_labels_at_1(real_data: Path) -> None:
    settings = CommonSettings(
        dataset="fmnist", partition="unseen", silos=5, data_dir=str(real_data)
    )
    silo = load_silo("silo-4", settings)
    assert silo.label_counts() == {
        "train": [0, 0, 0, 0, 0, 0, 900, 900, 0, 0],
        "val": [20] * 10,
        "test": [50] * 10,
    }


def test_no_track_of_signs_is_trained_on_at_one_silo_and_validates_at_another(
    tmp_path: Path,
) -> None:
    root = write_gtsrb(tmp_path, classes=43, tracks=3, frames=4)
    for own in range(43):  # each frame shows its track's number in blue
        for path in (root / "Final_Training" / "Images" / f"{own:05d}").glob("*.ppm"):
            pixels = np.full((20, 24, 3), int(path.name[:5]), np.uint8)
            pixels[..., 0] = own
            path.write_bytes(ppm(pixels))
    settings = CommonSettings(
        dataset="gtsrb",
        partition="unseen",
        silos=2,
        pixel_scale="raw",
        silo_train_size=43,
        silo_test_size=43,
    )
    places = Places(tmp_path, tmp_path / "cache")
    silos = [load_silo(name, settings, places) for name in ("silo-1", "silo-2")]
    shown = {
        part: {tuple(map(int, image[:, 9, 9])) for s in silos for image in s.splits()[part].inputs}
        for part in ("train", "val")
    }
    assert not shown["train"] & shown["val"]
    assert len(shown["val"]) == 43  # one track of three of each class
    assert len(silos[0].val) == len(silos[1].val) == 43 * 2
