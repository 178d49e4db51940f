import dataclasses
import io
import os
import re
import stat
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.images.declaration import Declaration
from fedsilo.datasets.images.manifests import IMAGES
from fedsilo.datasets.registry import load_silo, silo_count, silo_names
from fedsilo.datasets.silo.silos import Silo
from tests.support.data_folders import rewrite
from tests.support.errors import refuses

OWN = CommonSettings(dataset="images")
DECLARATION = """\
sites: {north: north/list.csv, south: south.csv}
classes: {benign: [nevus, 4], malignant: [melanoma]}
image-size: 16
"""


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Return two hospitals; image i of north has the level i, and patients have two images."""
    folder = tmp_path / "data"
    (folder / "north" / "photos").mkdir(parents=True)
    (folder / "images.yaml").write_text(DECLARATION)
    rows = []
    for number in range(16):
        Image.new("L", (16, 16), number).save(folder / "north" / "photos" / f"{number}.png")
        rows.append(f"photos/{number}.png,{'melanoma' if number < 4 else '4.0'},P{number // 2}\n")
    (folder / "north" / "list.csv").write_text("path,label,patient\n" + "".join(rows))
    (folder / "south.csv").write_text("path,label\nnorth/photos/1.png,nevus\ntoo.png,melanoma\n")
    return Places(folder, tmp_path / "cache")


def listing(places: Places, *lines: str) -> None:
    rewrite(places, "north/list.csv", lambda _: "".join(f"{line}\n" for line in lines))


def load(places: Places, site: str = "north", **changes: Any) -> Silo:
    return load_silo(site, dataclasses.replace(OWN, **changes), places)


def held(silo: Silo) -> list[list[int]]:
    return [[int(p[0, 0, 0]) for p in split.inputs] for split in silo.splits().values()]


def refused(places: Places) -> str:
    with pytest.raises(DataError) as caught:
        load(places)
    assert not [path for path in places.cache.rglob("*") if path.is_file()]
    return str(caught.value)


def test_a_silo_is_what_a_hospitals_manifest_lists(places: Places) -> None:
    silo = load(places)
    assert (silo.name, silo.distribution, silo.classes) == (
        "north",
        "north",
        ("benign", "malignant"),
    )
    assert (silo.shape.input_shape, silo.shape.outputs) == ((3, 16, 16), 2)
    train, val, test = held(silo)
    assert (sorted(train + test), val, len(test)) == (list(range(16)), [], 4)
    assert {number // 2 for number in train}.isdisjoint({number // 2 for number in test})
    for split, numbers in zip(silo.splits().values(), (train, val, test), strict=True):
        assert split.labels.tolist() == [int(number < 4) for number in numbers]


@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("split", [False, True])
def test_an_image_that_is_no_regular_file_is_named_by_its_line_and_not_opened(
    places: Places, kind: str, split: bool
) -> None:
    assert places.data is not None
    image = places.data / "north" / "photos" / "3.png"
    image.unlink()
    os.mknod(image, {"pipe": stat.S_IFIFO, "socket": stat.S_IFSOCK}[kind] | 0o600)
    if split:  # where contents are compared before they are decoded
        parts = ["split", *["train"] * 12, *["test"] * 4]
        lines = (places.data / "north" / "list.csv").read_text().splitlines()
        listing(places, *(f"{line},{part}" for line, part in zip(lines, parts, strict=True)))
    assert "1 of 16 images cannot be used: the image of line 5 is not a file: fix" in refused(
        places
    )


def test_the_declaration_names_the_silos_in_its_order(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert silo_names(dataclasses.replace(OWN, data_dir=str(places.data))) == ["north", "south"]
    monkeypatch.delenv("FEDSILO_DATA", raising=False)
    assert silo_count(OWN) is None
    with refuses(DataError, "east", "2", "north", "south"):
        load(places, "east")
    with refuses(DataError, "images", "images.yaml", "data.dir"):
        load(dataclasses.replace(places, data=None))


def test_a_hospital_needs_its_own_manifest_and_images_alone(places: Places) -> None:
    assert places.data is not None
    (places.data / "south.csv").unlink()
    assert len(held(load(places))[0]) == 12
    with refuses(DataError, "data/south.csv"):
        load(places, "south")


def test_images_are_found_from_the_manifests_own_folder(places: Places) -> None:
    assert IMAGES.index("north", OWN, places).names[3] == "north/photos/3.png"
    assert IMAGES.index("south", OWN, places).names == ("north/photos/1.png", "too.png")
    listing(places, "path,label", "../too.png,nevus", "./photos//..///photos/1.png,nevus")
    assert IMAGES.index("north", OWN, places).names == ("too.png", "north/photos/1.png")


def test_images_without_a_patient_stand_alone(places: Places) -> None:
    assert len(set(IMAGES.index("south", OWN, places).groups)) == 2
    listing(places, "patient,path,label", "P,a,nevus", ",b,nevus", ",c,nevus", "P,d,nevus")
    groups = IMAGES.index("north", OWN, places).groups
    assert groups[0] == groups[3]
    assert len(set(groups)) == 3


def test_the_declared_size_and_share_hold_unless_the_settings_say_otherwise(
    places: Places,
) -> None:
    assert load(places, image_size=20).shape.input_shape == (3, 20, 20)
    rewrite(places, "images.yaml", lambda text: text + "test-share: 0.5\n")
    assert [len(part) for part in held(load(places))] == [8, 0, 8]
    assert [len(part) for part in held(load(places, test_folds=4))] == [12, 0, 4]
    rewrite(places, "images.yaml", lambda text: text.replace("0.5", "0"))
    assert held(load(places)) == [list(range(16)), [], []]


def test_sites_whose_classes_labels_or_sizes_differ_have_another_schema(places: Places) -> None:
    first = load(places).schema
    assert load(places, fold_seed=3).schema == first
    for old, new in (
        ("image-size: 16", "image-size: 17"),
        ("[nevus, 4]", "[nevus, 4, 5]"),
        ("benign: [nevus, 4], malignant: [melanoma]", "malignant: [melanoma], benign: [nevus, 4]"),
    ):
        rewrite(places, "images.yaml", lambda text, o=old, n=new: text.replace(o, n))  # type: ignore[misc]
        assert load(places).schema != first
        rewrite(places, "images.yaml", lambda _: DECLARATION)


def test_a_plain_list_of_classes_names_their_labels(places: Places) -> None:
    assert places.data is not None
    rewrite(places, "images.yaml", lambda _: "sites: {a: a.csv}\nclasses: [x, y]\n")
    found = IMAGES.declaration(places)
    assert found.classes == {"x": ["x"], "y": ["y"]}
    assert (found.image_size, found.test_share) == (224, 0.25)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sites: {a: a.csv}", "lacks the key 'classes'"),
        ("classes: [x, y]", "lacks the key 'sites'"),
        ("sites: {a: a.csv}\nclasses: [x, y]\nimage_size: 3", "did you mean 'image-size'"),
        ("sites: {a: a.csv}\nclasses: [x]", "at least two class names"),
        ("sites: {a: a.csv}\nclasses: [x, x, y]", "a name appears twice"),
        ("sites: {a: a.csv}\nclasses: {x: [1], y: [1.0]}", "each label value must appear once"),
        ("sites: {a: a.csv}\nclasses: [yes, no]", "write it in quotes"),
        ("sites: {all: a.csv}\nclasses: [x, y]", "'all' stands for the mean"),
        ("sites: {}\nclasses: [x, y]", "'sites' must map"),
        (
            "sites: {a: a.csv}\nclasses: [x, y]\nimage-size: 15",
            "'image-size' must .* 16 to 4096",
        ),
        (
            "sites: {a: a.csv}\nclasses: [x, y]\nimage-size: 5000",
            "'image-size' must be a whole",
        ),
        ("sites: {a: a.csv}\nclasses: [x, y]\nimage-size: big", "must be a whole number"),
        ("sites: {a: a.csv}\nclasses: [x, y]\nimage-size:", "must be a whole number"),
        ("sites: {a: a.csv}\nclasses: [x, y]\nclasses: [x, z]", "has the key 'classes' twice"),
        (
            "sites: {a: a.csv}\nclasses: [x, y]\ntest-share: 1",
            "'test-share' must .* 0.0 to 0.9",
        ),
        ("sites: [", "not valid YAML"),
        ("- a", "must be a mapping"),
    ],
)
def test_a_wrong_declaration_is_told_with_its_file(places: Places, text: str, said: str) -> None:
    rewrite(places, "images.yaml", lambda _: text)
    with pytest.raises(DataError, match=rf"(?=.*data/images\.yaml).*{said}"):
        load(places)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "b.png,carcinoma,P1",
            "line 3, column 'label': this label is not one of 'nevus', '4', 'mel",
        ),
        ("b.png,,P1", "line 3, column 'label': this label is not one of"),
        ("../../b.png,nevus,P1", "line 3, column 'path': the file is outside the data directory"),
        ("//etc/b.png,nevus,P1", "line 3, column 'path': the path is absolute, but not below"),
        ("/etc/b.png,nevus,P1", "line 3, column 'path': the path is absolute, but not below"),
        (",nevus,P1", "line 3, column 'path': this is not a file name"),
        ("x/../a.png,nevus,P1", "line 3, column 'path': the same file is in line 2"),
        ("b.png,nevus", "line 3: 2 values, but line 1 names 3 columns"),
    ],
)
def test_a_bad_line_is_told_without_its_values(places: Places, line: str, said: str) -> None:
    listing(places, "path,label,patient", "a.png,nevus,P1", line)
    found = refused(places)
    assert re.search(rf"data/north/list\.csv, {said}", found)
    assert "carcinoma" not in found
    assert "P1" not in found


@pytest.mark.parametrize("header", ["path,label,pateint", "path,lable", "a.png,nevus,Smith"])
def test_a_misspelt_column_is_refused_and_not_repeated(places: Places, header: str) -> None:
    listing(places, header)
    found = refused(places)
    assert "line 1: the columns must be path, label, split (optional), patient (optional)" in found
    assert "Smith" not in found


@pytest.mark.parametrize("outside", ["../list.csv", "/list.csv", "//list.csv"])
def test_a_manifest_outside_the_data_directory_is_refused(places: Places, outside: str) -> None:
    rewrite(places, "images.yaml", lambda text: text.replace("north/list.csv", outside))
    assert "the manifest of site 'north' is outside the data directory" in refused(places)


def split_listing(places: Places, patient: Callable[[int], str] = str) -> None:
    parts = ["train"] * 9 + ["val"] * 3 + ["test"] * 4
    listing(
        places,
        "path,label,split,patient",
        *(f"photos/{i}.png,nevus,{part},{patient(i)}" for i, part in enumerate(parts)),
    )


def test_a_split_of_the_manifest_is_followed(places: Places) -> None:
    split_listing(places)
    whole = [list(range(9)), [9, 10, 11], [12, 13, 14, 15]]
    assert held(load(places)) == held(load(places, fold_seed=4)) == whole
    assert held(load(places, use_test=False)) == [*whole[:2], []]
    for kind in ("test", "val"):
        with refuses(DataError, "list.csv", kind):
            load(places, **{f"{kind}_folds": 2})


def test_validation_images_of_a_manifest_without_any_are_cut_by_patient(places: Places) -> None:
    split_listing(places, lambda i: str(i // 2))
    path = next((places.data or places.cache).rglob("list.csv"))
    path.write_text(path.read_text().replace(",val,", ",train,"))
    silo = load(places, val_folds=3)
    train, val, test = held(silo)
    assert test == [12, 13, 14, 15]
    assert sorted(train + val) == list(range(12))
    assert val
    assert not {i // 2 for i in train} & {i // 2 for i in val}


def test_an_empty_column_split_is_no_split(places: Places) -> None:
    listing(places, "path,label,split", *(f"photos/{i}.png,nevus," for i in range(16)))
    assert [len(part) for part in held(load(places, val_folds=2))] == [6, 6, 4]


@pytest.mark.parametrize("part", ["", "Train", "dev"])
def test_a_split_must_stand_in_all_lines_or_in_none(places: Places, part: str) -> None:
    listing(places, "path,label,split", "a,nevus,train", f"b,nevus,{part}", "c,nevus,test")
    said = "line 3, column 'split': the value must be one of train, val, test, in all lines"
    assert said in refused(places)


def test_a_patient_on_two_sides_is_told_by_the_lines(places: Places) -> None:
    split_listing(places, lambda i: "Smith" if i in (8, 9, 15) else f"{i}")
    found = refused(places)
    said = "a patient is in two parts, in lines 10 (train) and 11 (val), 10 (train) and 17 (test)"
    assert said in found
    assert "Smith" not in found
    split_listing(places, lambda i: "" if i in (8, 9, 15) else f"{i}")  # nobody is no patient
    assert len(held(load(places))[0]) == 9


def test_copies_of_a_file_on_two_sides_are_told(places: Places) -> None:
    assert places.data is not None
    split_listing(places)
    photos = places.data / "north" / "photos"
    (photos / "12.png").write_bytes((photos / "0.png").read_bytes())
    said = refused(places)
    assert said.endswith(
        "data/north/list.csv: files of equal content are in two parts: the image of line 2 (train) "
        "and the image of line 14 (test): keep one of each, or put both into one part"
    )


def test_a_link_on_the_other_side_is_a_copy_too(places: Places) -> None:
    assert places.data is not None
    split_listing(places)
    (places.data / "north" / "photos" / "10.png").unlink()
    (places.data / "north" / "photos" / "10.png").symlink_to("1.png")
    assert "the image of line 3 (train) and the image of line 12 (val)" in refused(places)


def missing_files(places: Places) -> None:
    """List sixteen files that are not there and are named after a patient."""
    lines = (f"smith-{number}.png,nevus,{number}" for number in range(16))
    listing(places, "path,label,patient", *lines)


def in_the_log(own_log: io.StringIO) -> str:
    (line,) = own_log.getvalue().splitlines()
    assert re.search(r"the image of line \d+.* is north/smith-\d+\.png, ", line)
    assert line.count("smith") == 5
    return line


def test_the_names_of_image_files_stay_in_the_hospitals_own_log(
    places: Places, own_log: io.StringIO
) -> None:
    missing_files(places)
    said = refused(places)
    assert "smith" not in said
    assert said.count("list.csv") == 1
    assert "list.csv: 16 of 16 images cannot be used: the image of line " in said
    assert " is missing; the image of line " in said
    assert in_the_log(own_log).endswith(" and 11 more")


def test_in_the_public_part_lines_are_told_with_their_manifest(
    places: Places, own_log: io.StringIO
) -> None:
    missing_files(places)
    shared = dataclasses.replace(OWN, public_share=0.9)
    with pytest.raises(DataError) as caught:
        IMAGES.public(shared, places)
    assert re.search(r"the image of line \d+ of \S+/north/list\.csv is missing", str(caught.value))
    assert "smith" not in str(caught.value)
    in_the_log(own_log)


def test_one_training_image_is_too_few(places: Places) -> None:
    listing(places, "path,label,split", "photos/1.png,nevus,train", "photos/2.png,nevus,test")
    assert "list.csv: 1 training images are left (0 were left out" in refused(places)
    listing(places, "path,label")
    assert "list.csv: 0 samples of 0 group" in refused(places)


def test_the_example_of_the_documentation_works(tmp_path: Path) -> None:
    docs = Path(__file__).resolve().parents[3] / "docs"
    (tmp_path / "images.yaml").write_text((docs / "examples" / "images.yaml").read_text())
    found = re.search(r"```csv\n(.*?)```", (docs / "images.md").read_text(), re.DOTALL)
    assert found
    (tmp_path / "north" / "photos").mkdir(parents=True)
    (tmp_path / "north" / "manifest.csv").write_text(found.group(1))
    for number in (1, 2, 3):
        path = tmp_path / "north" / "photos" / f"a{number}.jpg"
        Image.new("RGB", (90, 70), (number * 60, 0, 0)).save(path)
    silo = load(Places(tmp_path, tmp_path / "cache"))
    assert silo.shape.input_shape == (3, 64, 64)
    assert silo.label_counts() == {"train": [2, 0], "val": [0, 0], "test": [0, 1]}


def test_the_documentation_names_each_key_of_the_declaration_and_column() -> None:
    keys = [field.alias for field in Declaration.model_fields.values()]
    text = (Path(__file__).resolve().parents[3] / "docs" / "images.md").read_text()
    text, _ = text.split("## Dermoscopic images of six centres")
    rows = set(re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE))
    assert rows == {*keys, "path", "label", "patient", "split"}


def test_an_absolute_path_below_the_data_directory_is_read(places: Places) -> None:
    assert places.data is not None
    before = load(places).fingerprints
    photos = places.data / "north" / "photos"
    rewrite(places, "north/list.csv", lambda text: text.replace("photos/", f"{photos}/"))
    assert load(places).fingerprints == before


@pytest.mark.parametrize("mark", ["nan", "NA", "None", " unknown ", "?", "<NA>"])
def test_a_word_for_an_unknown_patient_is_no_patient(places: Places, mark: str) -> None:
    rewrite(places, "north/list.csv", lambda text: re.sub(r",P\d", f",{mark}", text))
    groups = IMAGES.index("north", OWN, places).groups
    assert len(set(groups)) == 16


def test_a_patient_with_most_images_is_mentioned(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(places, "north/list.csv", lambda text: re.sub(r",P[0-5]\b", ",P0", text))
    load(places)
    assert "one patient has 12 of 16 images" in caplog.text
    assert "P0" not in caplog.text


def test_a_file_name_in_another_unicode_form_is_found(places: Places) -> None:
    assert places.data is not None
    photos = places.data / "north" / "photos"
    decomposed = unicodedata.normalize("NFD", "größe.png")
    (photos / "3.png").rename(photos / decomposed)
    rewrite(places, "north/list.csv", lambda text: text.replace("photos/3.png", "photos/größe.png"))
    assert f"north/photos/{decomposed}" in IMAGES.index("north", OWN, places).names
