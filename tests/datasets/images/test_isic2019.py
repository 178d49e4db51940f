import csv
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fedsilo.core.errors import DataError, FileNamesError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.isic2019 import CENTRES, DIAGNOSES, ISIC2019, class_of, classes_of
from fedsilo.datasets.registry import load_silo, silo_count, silo_names
from fedsilo.datasets.silo.silos import Silo
from fedsilo.datasets.synthetic.phantoms import LESION_COUNTS
from tests.support.errors import refuses

ISIC = CommonSettings(dataset="isic2019", image_size=32)
HEADER = "image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK,target,center,fold,fold2"


def line(image: str, target: object, centre: object) -> str:
    return f"{image},0,0,0,0,0,0,0,0,0,{target},{centre},train,train_0\n"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Return centre 0 of twelve images of target i % 8, and centre 4 of none that is here.

    Image i of centre 0 has the level i; the lesions are of two images each, but for the last two.
    """
    folder = tmp_path / "data" / "isic2019"
    (folder / "images").mkdir(parents=True)
    rows = [line(f"I{i}", i % 8, 0) for i in range(12)] + [line(f"M{i}", 1, 4) for i in range(3)]
    (folder / "train_test_split").write_text(f"{HEADER}\n" + "".join(rows))
    lesions = "".join(f"L{i // 2},I{i}\n" for i in range(10))
    (folder / "HAM10000_metadata").write_text("lesion_id,image_id\n" + lesions)
    for i in range(12):
        Image.new("RGB", (32, 32), (i, i, i)).save(folder / "images" / f"I{i}.jpg", quality=100)
    return Places(tmp_path / "data", tmp_path / "cache")


def rewrite(places: Places, change: Callable[[str], str], name: str = "train_test_split") -> None:
    assert places.data is not None
    path = places.data / "isic2019" / name
    path.write_text(change(path.read_text() if path.exists() else ""))


def load(places: Places, site: str = "bcn", **changes: Any) -> Silo:
    return load_silo(site, dataclasses.replace(ISIC, **changes), places)


def shown(silo: Silo) -> list[tuple[int, int]]:
    """Return image and label of everything in a silo."""
    return sorted(
        (int(picture[0, 0, 0]), int(label))
        for split in silo.splits().values()
        for picture, label in zip(split.inputs, split.labels, strict=True)
    )


def test_a_centre_holds_its_images_with_nevus_against_all_others(places: Places) -> None:
    silo = load(places)
    assert silo.classes == ("other", "nevus")
    assert shown(silo) == [(i, int(i % 8 == 1)) for i in range(12)]
    assert (silo.distribution, silo.shape.input_shape) == ("bcn", (3, 32, 32))


def test_a_centre_holds_its_images_with_their_diagnoses(places: Places) -> None:
    silo = load(places, target="diagnosis")
    assert silo.classes == ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
    assert silo.shape.outputs == 8
    assert shown(silo) == [(i, i % 8) for i in range(12)]


def test_classes_are_what_the_target_makes_of_the_diagnoses() -> None:
    assert [class_of(d, "nevus") for d in range(8)] == [0, 1, 0, 0, 0, 0, 0, 0]
    assert [class_of(d, "diagnosis") for d in range(8)] == list(range(8))
    for target in ("nevus", "diagnosis"):
        for name, labels in classes_of(target).items():
            for label in labels:
                found = class_of(DIAGNOSES.index(label), target)
                assert list(classes_of(target))[found] == name
    assert sum(len(labels) for labels in classes_of("nevus").values()) == 8


def test_images_of_a_lesion_are_on_one_side_and_one_without_a_lesion_stands_alone(
    places: Places,
) -> None:
    index = ISIC2019.index("bcn", ISIC, places)
    assert index.groups == (*(f"L{i // 2}" for i in range(10)), "I10", "I11")
    for seed in range(5):
        silo = load(places, fold_seed=seed)
        sides = [{int(p[0, 0, 0]) // 2 for p in s.inputs} for s in (silo.train, silo.test)]
        assert sides[0] & sides[1] <= {5}


def test_the_table_of_isic_names_lesions_that_ham10000_does_not_know(places: Places) -> None:
    table = "image,age,lesion_id\nI10,55,B7\nI11,55,B7\nI0,55,B7\nI9,55,\n"
    rewrite(places, lambda _: table, "ISIC_2019_Training_Metadata.csv")
    groups = ISIC2019.index("bcn", ISIC, places).groups
    assert groups == (*(f"L{i // 2}" for i in range(10)), "B7", "B7")
    assert places.data is not None
    (places.data / "isic2019" / "HAM10000_metadata").unlink()
    groups = ISIC2019.index("bcn", ISIC, places).groups
    assert groups == ("B7", *(f"I{i}" for i in range(1, 10)), "B7", "B7")
    (places.data / "isic2019" / "ISIC_2019_Training_Metadata.csv").unlink()
    with pytest.raises(DataError, match=r"no table of lesions, .*: put HAM10000_metadata or ISIC"):
        load(places)


def test_a_centre_that_no_table_of_lesions_knows_is_refused(places: Places) -> None:
    assert places.data is not None
    for i in range(3):
        Image.new("RGB", (32, 32), (i, i, i)).save(
            places.data / "isic2019" / "images" / f"M{i}.jpg"
        )
    with pytest.raises(DataError) as caught:
        load(places, "msk4")
    assert str(caught.value) == (
        "isic2019, msk4: no table of lesions names an image of this centre, so images of a "
        "lesion would be both training and test data: put ISIC_2019_Training_Metadata.csv into "
        "the folder isic2019 of the data directory"
    )
    assert len(load(places).train) == 9, "the other centre goes on"
    table = "image,lesion_id\nM0,\nM1,B8\n"
    rewrite(places, lambda _: table, "ISIC_2019_Training_Metadata.csv")
    assert ISIC2019.index("msk4", ISIC, places).groups == ("M0", "B8", "M2")
    rewrite(places, lambda _: "image,lesion_id\nM0,\n", "ISIC_2019_Training_Metadata.csv")
    assert ISIC2019.index("msk4", ISIC, places).groups == ("M0", "M1", "M2")


def test_a_centre_of_which_no_image_is_here_is_left_out_and_named(places: Places) -> None:
    there = dataclasses.replace(ISIC, data_dir=str(places.data))
    assert silo_names(there) == ["bcn"]
    assert silo_count(there) is None, "the server's images are not the hospitals'"
    assert ISIC2019.notices(there) == [
        "isic2019: no image of vidir_molemax, vidir_modern, rosendahl, msk4, vienna_dias is here; "
        "left out"
    ]
    with refuses(FileNamesError, "msk4", "1"):
        load(places, "msk4")
    with refuses(FileNamesError, "basel", "1"):
        load(places, "basel")


def test_a_server_without_data_knows_no_sites_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSILO_DATA", raising=False)
    assert silo_count(ISIC) is None
    assert ISIC2019.notices(ISIC) == []
    with refuses(DataError, "isic2019", "data.dir"):
        load(Places(None, tmp_path))
    with pytest.raises(DataError, match=r"isic2019 has no folder of images: put them into one of"):
        load(Places(tmp_path, tmp_path))


def test_a_centre_that_lacks_some_images_is_refused_or_goes_on_without_them(
    places: Places,
) -> None:
    assert places.data is not None
    (places.data / "isic2019" / "images" / "I3.jpg").unlink()
    with refuses(DataError, "1", "12", "I3.jpg"):
        load(places)
    silo = load(places, broken_images="skip")
    assert silo.dropped == 1
    assert [image for image, _ in shown(silo)] == [i for i in range(12) if i != 3]


def test_images_that_the_list_of_available_ones_lacks_are_not_looked_for(places: Places) -> None:
    assert places.data is not None
    (places.data / "isic2019" / "images" / "I3.jpg").unlink()
    listed = "".join(f"I{i},x\n" for i in range(12) if i != 3)
    rewrite(places, lambda _: f"image,dx\n{listed}ELSEWHERE,x\n", "available.csv")
    silo = load(places)
    assert (silo.dropped, len(shown(silo))) == (0, 11)
    rewrite(places, lambda _: "image\nM0\n", "available.csv")
    assert ISIC2019.silo_names(ISIC, places) == []


@pytest.mark.parametrize(
    "name", ["ISIC_2019_Training_Input_preprocessed", "ISIC_2019_Training_Input"]
)
def test_images_lie_in_any_of_the_usual_folders(places: Places, name: str) -> None:
    assert places.data is not None
    folder = places.data / "isic2019"
    (folder / "images").rename(folder / name)
    assert len(shown(load(places))) == 12


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (line("I0", 1, 0), "line 17: image I0 is listed twice"),
        (line("J", 8, 0), "line 17, column 'target': the value must be a number from 0 to 7"),
        (line("J", "nv", 0), "line 17, column 'target'"),
        (line("J", -1, 0), "line 17, column 'target'"),
        (line("J", "", 0), "line 17, column 'target'"),
        (line("J", 1, 6), "line 17, column 'center': the value must be a number from 0 to 5"),
        (line("J", 1, "0.5"), "line 17, column 'center'"),
        (line("../J", 1, 0), "line 17, column 'image': this is not an image's name"),
        (line("", 1, 0), "line 17, column 'image'"),
        ("J,1\n", "line 17: 2 values, but line 1 names 14 columns"),
    ],
)
def test_a_bad_line_of_the_listing_is_told(places: Places, row: str, said: str) -> None:
    assert len(shown(load(places))) == 12
    rewrite(places, lambda text: text + row)
    with pytest.raises(DataError, match=f"isic2019/train_test_split, {said}"):
        load(places)


@pytest.mark.parametrize(
    ("name", "old", "said"),
    [
        ("train_test_split", "center", [1, "center"]),
        ("train_test_split", "target", ["target"]),
        ("HAM10000_metadata", "lesion_id", [1, "lesion_id"]),
    ],
)
def test_a_missing_column_is_told(places: Places, name: str, old: str, said: list[object]) -> None:
    rewrite(places, lambda text: text.replace(old, "other"), name)
    with refuses(DataError, *said):
        load(places)


def test_targets_written_as_decimals_are_numbers_too(places: Places) -> None:
    first = shown(load(places))
    rewrite(places, lambda text: text.replace(",1,0,train", ",1.0,0.0,train"))
    assert shown(load(places)) == first


# The real files: no image of bcn and msk4 is among them
REAL = {"vidir_molemax": 3159, "vidir_modern": 1346, "rosendahl": 1259, "vienna_dias": 220}


@pytest.fixture
def real(real_data: Path, tmp_path: Path) -> Places:
    return Places(real_data, tmp_path / "cache")


def test_the_real_centres_have_the_sizes_and_lesions_of_their_list(real: Places) -> None:
    assert real.data is not None
    assert ISIC2019.silo_names(ISIC, real) == list(REAL)
    with (real.data / "isic2019" / "available.csv").open() as file:
        listed = {row["image"]: row for row in csv.DictReader(file)}
    for site, count in REAL.items():
        index = ISIC2019.index(site, dataclasses.replace(ISIC, target="diagnosis"), real)
        assert len(index) == count
        for name, label, lesion in zip(index.names, index.labels, index.groups, strict=True):
            row = listed[name.removesuffix(".jpg")]
            assert (int(row["target"]), row["lesion_id"]) == (label, lesion)
            assert CENTRES[int(row["center"])] == site


def test_flambys_table_has_the_counts_that_the_phantom_has(real_data: Path) -> None:
    counts = {centre: [0] * 8 for centre in CENTRES}
    with (real_data / "isic2019" / "train_test_split").open() as file:
        for row in csv.DictReader(file):
            counts[CENTRES[int(row["center"])]][int(row["target"])] += 1
    assert {site: tuple(found) for site, found in counts.items()} == LESION_COUNTS


def test_real_images_are_decoded_and_split_by_lesion(real: Places) -> None:
    sampled = dataclasses.replace(ISIC, sample_share=0.05, public_share=0.2, val_folds=3)
    public = ISIC2019.public(sampled, real)
    assert public.inputs.shape[1:] == (3, 32, 32)
    pictures = {p.numpy().tobytes() for p in public.inputs}
    total = 0
    for site, count in REAL.items():
        silo = load_silo(site, sampled, real)
        index = ISIC2019.index(site, sampled, real)
        images = torch.cat([split.inputs for split in silo.splits().values()])
        assert images.dtype == torch.uint8
        assert pictures.isdisjoint(p.numpy().tobytes() for p in images)
        assert 0.02 * count < len(index) < 0.08 * count
        assert len(silo.test) == pytest.approx(len(images) / 4, abs=3)
        assert images.float().std() > 10
        total += len(index) - len(images)
    assert total == len(public) > 0
