"""Images sorted into folders are the silos that the manifests of the same folders are."""

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image

from fedsilo.cli.main import main
from fedsilo.core.errors import DataError, FileNamesError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.folders import FOLDER, read_folder, write_folder_manifests
from fedsilo.datasets.registry import load_silo, silo_names
from fedsilo.datasets.silo.silos import SPLITS, Silo
from tests.support.data_folders import write_sorted
from tests.support.errors import refuses


def save(folder: Path, *levels: int) -> None:
    """Write images of one grey each, named by it."""
    folder.mkdir(parents=True)
    for level in levels:
        Image.new("L", (20, 24), level).save(folder / f"{level}.png")


def settings(data: Path, dataset: str = "folder", **changes: Any) -> CommonSettings:
    cache = str(data.parent / "cache")
    return CommonSettings(
        dataset=dataset, data_dir=str(data), cache_dir=cache, image_size=16, **changes
    )


def held(silo: Silo) -> dict[str, list[tuple[int, int]]]:
    """Return the grey and the class of each image, by part."""
    return {
        part: [(int(image[0, 0, 0]), int(y)) for image, y in zip(s.inputs, s.labels, strict=True)]
        for part, s in silo.splits().items()
    }


def test_folders_of_sites_and_classes_are_silos_with_the_classes_in_alphabetical_order(
    tmp_path: Path,
) -> None:
    data = write_sorted(tmp_path / "data")
    assert silo_names(settings(data)) == ["north", "south"]
    silo = load_silo("south", settings(data))
    assert silo.class_names() == ("a", "b")
    assert [len(silo.splits()[part]) for part in SPLITS] == [12, 0, 4]
    assert silo.label_counts()["test"] == [2, 2]
    folds = load_silo("south", settings(data, test_folds=4, val_folds=3))
    assert [len(folds.splits()[part]) for part in SPLITS] == [8, 4, 4]


def test_folders_of_parts_are_the_parts(tmp_path: Path) -> None:
    data = tmp_path / "data"
    save(data / "north" / "train" / "cat", 1, 2)
    save(data / "north" / "train" / "dog", 3)
    save(data / "north" / "test" / "cat", 4)
    save(data / "south" / "cat", 5, 6)
    save(data / "south" / "dog", 7, 8)
    assert held(load_silo("north", settings(data))) == {
        "train": [(1, 0), (2, 0), (3, 1)],
        "val": [],
        "test": [(4, 0)],
    }
    assert load_silo("north", settings(data, use_test=False)).label_counts()["test"] == [0, 0]
    assert sum(len(s) for s in load_silo("south", settings(data)).splits().values()) == 4


def test_classes_without_sites_are_one_silo_that_a_partition_cuts(tmp_path: Path) -> None:
    data = tmp_path / "data"
    save(data / "train" / "cat", *range(20))
    save(data / "train" / "dog", *range(20, 40))
    save(data / "test" / "cat", 40, 41, 42, 43)
    save(data / "test" / "dog", 44, 45, 46, 47)
    assert silo_names(settings(data)) == ["folder"]
    cut = settings(data, partition="dirichlet", silos=2, concentration=1000.0)
    silos = [load_silo(name, cut) for name in silo_names(cut)]
    levels = {p: sorted(level for s in silos for level, _ in held(s)[p]) for p in SPLITS}
    assert sorted(levels["train"] + levels["val"]) == list(range(40))
    assert levels["test"] == list(range(40, 48))
    assert silos[0].class_names() == ("cat", "dog")


def test_a_hospital_with_classes_alone_holds_them_under_its_own_name(tmp_path: Path) -> None:
    data = write_sorted(tmp_path / "data")
    own = dataclasses.replace(settings(data), data_dir=str(data / "north"))
    alone = load_silo("st-mary", own)
    assert alone.name == "st-mary"
    assert alone.schema == load_silo("north", settings(data)).schema


@pytest.mark.parametrize("parts", [False, True])
def test_the_manifests_of_a_folder_are_the_same_silos(
    parts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_sorted(tmp_path / "data")
    if parts:
        for site in ("north", "south"):
            shutil.copytree(data / site, data / "copy" / "train")
            shutil.rmtree(data / site)
            (data / "copy").rename(data / site)
    assert main(["manifest", "folder", str(data)]) == 0
    printed = capsys.readouterr().out
    assert f"{data}/north/manifest.csv: 16 images\n  a: 8\n  b: 8\n" in printed
    for site in ("north", "south"):
        one, other = (load_silo(site, settings(data, name)) for name in ("folder", "images"))
        assert one.fingerprints == other.fingerprints
        assert (one.schema, one.classes) == (other.schema, other.classes)
    assert main(["manifest", "folder", str(data)]) == 1
    assert "images.yaml already exists: remove it" in capsys.readouterr().err


def test_manifests_list_the_classes_of_all_sites_where_a_site_lacks_one(tmp_path: Path) -> None:
    data = write_sorted(tmp_path / "data")
    shutil.rmtree(data / "south" / "a")
    assert main(["manifest", "folder", str(data)]) == 0
    south = load_silo("south", settings(data, "images"))
    assert south.class_names() == ("a", "b")
    assert sum(counts[0] for counts in south.label_counts().values()) == 0


@pytest.mark.parametrize("name", [" b", "b\n"])
def test_a_class_that_no_manifest_can_name_is_refused_and_nothing_is_written(
    name: str, tmp_path: Path
) -> None:
    data = write_sorted(tmp_path / "data")
    (data / "south" / "b").rename(data / "south" / name)
    with pytest.raises(DataError, match=r"must not begin with a space .*: rename its folders"):
        write_folder_manifests(data)
    assert not list(data.rglob("manifest.csv"))
    assert name in load_silo("south", settings(write_spaced(data, name), "folder")).classes


def write_spaced(data: Path, name: str) -> Path:
    """Give the other site the same class."""
    (data / "north" / "b").rename(data / "north" / name)
    return data


def empty_class(data: Path) -> None:
    for path in (data / "north" / "a").iterdir():
        path.rename(path.with_suffix(".txt"))


def one_class(data: Path) -> None:
    shutil.rmtree(data / "north" / "a")
    shutil.rmtree(data / "south" / "a")


def other_classes(data: Path) -> None:
    (data / "south" / "a").rename(data / "south" / "A")


def no_classes(data: Path) -> None:
    (data / "west").mkdir()


def nothing(data: Path) -> None:
    shutil.rmtree(data)
    data.mkdir()


def strange_site(data: Path) -> None:
    (data / "north").rename(data / "north=east")


def gone(data: Path) -> None:
    shutil.rmtree(data)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            empty_class,
            ["north/a"],
        ),
        (one_class, ["b"]),
        (other_classes, ["north", "south", "A"]),
        (no_classes, ["SITE/CLASS"]),
        (nothing, ["SITE/CLASS"]),
        (strange_site, ["north=east"]),
        (gone, []),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_before_anything_trains(
    spoil: Callable[[Path], None], said: list[object], tmp_path: Path
) -> None:
    data = write_sorted(tmp_path / "data")
    spoil(data)
    with refuses(FileNamesError, *said):
        silo_names(settings(data))


def test_a_file_that_is_no_image_is_named_by_its_class_and_not_by_its_name(tmp_path: Path) -> None:
    data = write_sorted(tmp_path / "data")
    (data / "north" / "b" / "3.png").rename(data / "north" / "b" / "mrs-smith.png")
    (data / "north" / "b" / "mrs-smith.png").write_text("no image")
    with refuses(DataError, 8, "b") as refused:
        load_silo("north", settings(data))
    assert "smith" not in str(refused.value)
    assert load_silo("north", settings(data, broken_images="skip")).dropped == 1


def test_hidden_files_and_others_than_images_are_not_counted(tmp_path: Path) -> None:
    data = write_sorted(tmp_path / "data")
    (data / "north" / "a" / ".DS_Store").write_text("")
    (data / "north" / "a" / "notes.txt").write_text("")
    (data / ".cache").mkdir()
    assert {site: len(images) for site, images in read_folder(data).items()} == {
        "north": 16,
        "south": 16,
    }


def test_the_same_file_in_two_parts_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "data" / "train" / "cat", 1, 2)
    save(tmp_path / "data" / "train" / "dog", 3, 4)
    save(tmp_path / "data" / "test" / "dog", 4)
    with refuses(DataError, "test/dog", "2", "train/dog"):
        load_silo("folder", settings(tmp_path / "data"), Places(tmp_path / "data", tmp_path / "c"))


def names_of_parts(data: Path) -> None:
    (data / "north").rename(data / "Training")
    (data / "south").rename(data / "Testing")


def a_copy_next_to_the_parts(data: Path) -> None:
    for part in SPLITS:
        shutil.copytree(data / "north", data / part)
    shutil.rmtree(data / "north")


def validation_called_valid(data: Path) -> None:
    for site in ("north", "south"):
        own = data / site
        (own / "train").mkdir()
        (own / "a").rename(own / "train" / "a")
        (own / "b").rename(own / "train" / "b")
        shutil.copytree(own / "train", own / "valid")


def years_below_classes(data: Path) -> None:
    for site in ("north", "south"):
        (data / site / "a").rename(data / site / "2019")
        (data / site / "b").rename(data / site / "2020")


def masks_next_to_images(data: Path) -> None:
    for site in ("north", "south"):
        (data / site / "a").rename(data / site / "images")
        (data / site / "b").rename(data / site / "masks")


def loose_images_in_sites(data: Path) -> None:
    shutil.copy(next((data / "north" / "a").iterdir()), data / "north" / "overview.png")


def loose_images_in_sites_with_parts(data: Path) -> None:
    validation_called_valid(data)
    for site in ("north", "south"):
        (data / site / "valid").rename(data / site / "val")
    loose = next((data / "north" / "train" / "a").iterdir())
    shutil.copy(loose, data / "north" / "overview.png")


@pytest.mark.parametrize(
    "arrange",
    [
        loose_images_in_sites,
        loose_images_in_sites_with_parts,
        names_of_parts,
        a_copy_next_to_the_parts,
        validation_called_valid,
        years_below_classes,
        masks_next_to_images,
    ],
)
def test_a_layout_that_would_only_be_guessed_is_refused(
    arrange: Callable[[Path], None], tmp_path: Path
) -> None:
    data = write_sorted(tmp_path / "data")
    arrange(data)
    with pytest.raises(DataError) as refused:
        silo_names(settings(data))
    assert refused.value.code == "file-names"


def test_valid_and_invalid_are_classes(tmp_path: Path) -> None:
    data = write_sorted(tmp_path / "data")
    for site in ("north", "south"):
        (data / site / "a").rename(data / site / "valid")
        (data / site / "b").rename(data / site / "invalid")
    assert load_silo("north", settings(data)).class_names() == ("invalid", "valid")


def test_a_class_in_two_unicode_forms_is_one_class(tmp_path: Path) -> None:
    data = write_sorted(tmp_path / "data")
    (data / "north" / "b").rename(data / "north" / "b\u00f6se")
    (data / "south" / "b").rename(data / "south" / "bo\u0308se")
    for site in ("north", "south"):
        assert load_silo(site, settings(data)).class_names() == ("a", "b\u00f6se")


def test_files_that_are_not_read_are_counted_by_reason(tmp_path: Path) -> None:
    data = write_sorted(tmp_path / "data")
    save(data / "north" / "a" / "second series", 1, 2, 3)
    (data / "south" / "b" / "notes.txt").write_text("")
    assert FOLDER.notices(settings(data)) == [
        "folder 'north/a': 3 files in subfolder 'second series' not read",
        "folder 'south/b': 1 file without an image's ending not read",
    ]


def test_images_next_to_folders_are_counted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for part in ("train", "test"):
        for name in ("a", "b"):
            save(data / "north" / part / name, 1, 2, 3)
    for folder in (data, data / "north" / "train"):
        shutil.copy(data / "north" / "test" / "a" / "1.png", folder)
    assert FOLDER.notices(settings(data)) == [
        "folder 'data': 1 image next to folders not read",
        "folder 'north/train': 1 image next to folders not read",
    ]


def test_copies_of_a_file_are_in_one_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write_sorted(tmp_path / "data")
    for image in list((data / "north").rglob("*.png")):
        shutil.copy(image, image.with_name(f"{image.stem} (1).png"))
    silo = load_silo("north", settings(data))
    train, test = ({image.numpy().tobytes() for image in s.inputs} for s in (silo.train, silo.test))
    assert test
    assert not train & test
    assert "16 of 32 images are copies of another image" in caplog.text


_SITE = st.sampled_from(["north", "south", "train", "a"])
_CLASS = st.sampled_from(["a", "b", "test", "2020"])
_INNER = st.sampled_from(["", "series 2", "a"])
_FILE = st.sampled_from(["1.png", "2.JPG", "3.tiff"])


@given(
    classes=st.lists(st.tuples(_SITE, _CLASS, _INNER, _FILE), max_size=16),
    loose=st.lists(st.tuples(_SITE, _FILE), max_size=2),
)
@hypothesis_settings(max_examples=80, deadline=None)
def test_every_image_is_read_or_counted_or_the_folder_is_refused(
    classes: list[tuple[str, ...]], loose: list[tuple[str, ...]]
) -> None:
    with TemporaryDirectory() as name:
        data = Path(name) / "data"
        data.mkdir()
        for parts in (*classes, *loose):
            path = data.joinpath(*parts)
            if not path.parent.is_file() and not path.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(str(parts))
        own = settings(data)
        places = Places(data, data.parent / "cache")
        try:
            read = sum(len(FOLDER.index(site, own, places)) for site in silo_names(own))
        except DataError:
            return
        sentences = FOLDER.unread_files(own, places)
        counted = sum(int(re.search(r": (\d+) (file|image)s? ", text)[1]) for text in sentences)
        assert read + counted == sum(map(Path.is_file, data.rglob("*")))
