"""MedMNIST's files as silos: their own split, shuffled, with the classes' names."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedsilo.core.errors import DataError, SettingError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.downloads.public_files import public_data
from fedsilo.datasets.registry import check_data_settings, load_silo, silo_names
from fedsilo.datasets.shifted.medmnist import MEDMNIST, read_parts
from fedsilo.datasets.shifted.pools import open_pool
from fedsilo.datasets.silo.silos import SPLITS
from tests.support.made_data import write_medmnist

BLOOD = CommonSettings(dataset="bloodmnist", silos=3, pixel_scale="raw")


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Return BloodMNIST's file: image i of a part has the level i and the label i mod 8."""
    write_medmnist(tmp_path / "data", "bloodmnist")
    return Places(tmp_path / "data", tmp_path / "cache")


def levels(images: npt.NDArray[Any]) -> list[int]:
    return [int(image.reshape(-1)[0]) for image in images]


def test_each_part_of_the_file_is_a_part_of_the_pool_shuffled_with_its_labels(
    places: Places,
) -> None:
    pool, _ = open_pool(MEDMNIST["bloodmnist"], places)
    assert pool.val_images is not None
    assert pool.val_labels is not None
    for images, labels in (
        (pool.train_images, pool.train_labels),
        (pool.val_images, pool.val_labels),
        (pool.test_images, pool.test_labels),
    ):
        found = levels(images)
        assert found != sorted(found) == list(range(60))
        assert [level % 8 for level in found] == labels.tolist()
    assert levels(pool.train_images) != levels(pool.test_images)


def test_silos_are_slices_of_each_part_and_none_of_training_images_validates(
    places: Places,
) -> None:
    assert silo_names(BLOOD) == ["s1a", "s2a", "s3a"]
    pool, _ = open_pool(MEDMNIST["bloodmnist"], places)
    silo = load_silo("s1a", BLOOD, places)
    assert [len(silo.splits()[part]) for part in SPLITS] == [20, 20, 20]
    assert levels(silo.train.inputs.numpy()) == levels(pool.train_images[:20])
    assert pool.val_images is not None
    assert levels(silo.val.inputs.numpy()) == levels(pool.val_images[:20])
    assert silo.shape.input_shape == (3, 28, 28)
    assert silo.class_names()[3] == "immature granulocytes"


def test_a_partition_keeps_the_parts_and_the_classes_names(places: Places) -> None:
    settings = dataclasses.replace(BLOOD, partition="dirichlet", concentration=100.0)
    check_data_settings(settings)
    silos = [load_silo(name, settings, places) for name in silo_names(settings)]
    for part in SPLITS:
        held = [level for one in silos for level in levels(one.splits()[part].inputs.numpy())]
        assert sorted(held) == list(range(60))
    assert silos[0].class_names()[0] == "basophil"


@pytest.mark.parametrize("name", MEDMNIST)
def test_every_set_has_names_for_its_classes_and_a_file_with_a_checksum(name: str) -> None:
    source, public = MEDMNIST[name], public_data()[name]
    assert len(set(source.class_names)) == source.classes >= 2
    assert [file.name for file in public.files] == [f"{name}.npz"]
    assert len(public.files[0].md5) == 32
    assert public.url == "https://zenodo.org/records/10519652/files/"


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("train_images", np.zeros((60, 28, 28), np.uint8), r"must be uint8 \(n, 28, 28, 3\)"),
        ("test_labels", np.full((60, 1), 8), "test_labels must be 0 to 7, but some are not"),
        ("val_labels", np.zeros((60, 14), int), "a whole number for each of 60 images"),
    ],
)
def test_a_file_of_another_set_is_refused_with_how_to_get_the_right_one(
    places: Places, name: str, array: npt.NDArray[Any], said: str
) -> None:
    assert places.data is not None
    path = places.data / "medmnist" / "bloodmnist.npz"
    with np.load(path) as whole:
        arrays = {one: whole[one] for one in whole.files}
    np.savez(path, **(arrays | {name: array}))
    with pytest.raises(DataError, match=f"{said}.*: run 'fedsilo fetch bloodmnist"):
        load_silo("s1a", BLOOD, places)


def test_more_unseen_labels_than_there_are_is_refused_before_a_file_is_read() -> None:
    settings = CommonSettings(dataset="breastmnist", partition="unseen", silos=3)
    with pytest.raises(SettingError, match="but 2 labels cannot"):
        check_data_settings(settings)


def test_the_real_file_of_this_form_has_the_published_counts(real_data: Path) -> None:
    parts = read_parts(real_data / "pneumoniamnist" / "pneumoniamnist.npz", 2)
    assert {part: len(labels) for part, (_, labels) in parts.items()} == {
        "train": 4708,
        "val": 524,
        "test": 624,
    }
