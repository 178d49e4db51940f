"""Silos that cannot be cut or read from their data, and their fixes."""

from pathlib import Path

import pytest

from fedsilo.datasets.registry import load_silo, silo_names
from fedsilo.server_app.config.settings import resolve
from tests.support.colour import write_gtsrb, write_signs
from tests.support.data_folders import SITES, write_images, write_tables
from tests.support.fixes import Case, Changes, Values, check, refused
from tests.support.made_data import SMALL, write_data
from tests.support.setting_keys import as_keys

UNSEEN: Values = {"dataset": "digits", "partition": "unseen", "unseen": 0.0}
DIRICHLET: Values = {"dataset": "digits", "partition": "dirichlet", "concentration": 0.3}
LABELS: Values = {"dataset": "digits", "split.partition": "labels", "split.labels-per-silo": 1}
OWN: Changes = {"partition": "own", "unseen": None, "silos": 9}

# Parts of the errors that the functions below try
TRIED = (
    "needs a folder",
    "needs files, but no data directory is named: set 'data.dir' or $FEDSILO_DATA, or",
    "images itself: set 'split.val-folds' to 0, or put them into 'train'",
    "lower 'split.silos' or take more data",
    "training images are frames of one track",
    "rows are too few for a test part of",
    "the first line does not name the schema's columns",
)
CASES = [
    Case(
        "raise 'split.silo-train-size' to at least",
        {
            "dataset": "digits",
            "split.silos": 3,
            "split.silo-train-size": 5,
            "split.silo-test-size": 5,
        },
        {"'split.silo-train-size' to at least 10": {"split.silo-train-size": 10}},
    ),
    Case(
        "lower 'split.silos', or take more data",
        {"dataset": "digits", "silos": 200},
        {"lower 'split.silos'": {"silos": 100}},
    ),
    Case(
        "a silo of 9 training images has no validation part, because",
        {**UNSEEN, "split.silos": 3, "split.silo-train-size": 9, "split.unseen": 1.0},
        {"raise 'split.silo-train-size' to at least 10": {"split.silo-train-size": 10}},
    ),
    Case(
        "lower 'split.silos', or choose another 'split.partition'",
        {**UNSEEN, "silos": 100},
        {
            "lower 'split.silos'": {"silos": 30},
            "another 'split.partition'": {
                "split.partition": "labels",
                "split.unseen": None,
                "split.labels-per-silo": 5,
            },
        },
    ),
    Case(
        "no training image is left of label 0 for silo-1",
        {**UNSEEN, "split.silos": 3, "split.silo-train-size": 10},
        {"raise 'split.silo-train-size' to at least 11": {"split.silo-train-size": 11}},
    ),
    Case(
        "no training image is left of label",
        {**UNSEEN, "split.silos": 150, "split.silo-train-size": 100},
        {"lower 'split.silos', or": {"silos": 14}, "or choose another 'split.partition'": OWN},
    ),
    Case(
        "training images need more than their labels have",
        {**UNSEEN, "split.silos": 9, "split.silo-train-size": 300},
        {
            "lower 'split.silo-train-size'": {"split.silo-train-size": 150},
            "or 'split.silos'": {"silos": 4},
        },
    ),
    Case(
        "raise 'split.concentration', lower 'split.silos', or set another 'split.fold-seed'",
        {**DIRICHLET, "split.silos": 60, "split.fold-seed": 3},
        {
            "raise 'split.concentration'": {"concentration": 3.0},
            "lower 'split.silos'": {"silos": 30},
            "another 'split.fold-seed'": {"split.fold-seed": 4},
        },
    ),
    Case(
        "lower 'split.silos', or set another 'split.fold-seed'",
        {**LABELS, "split.silos": 701, "split.fold-seed": 11},
        {
            "lower 'split.silos'": {"silos": 600},
            "another 'split.fold-seed'": {"split.fold-seed": 12},
        },
    ),
    Case(
        "leaves 9 of 9 silos without 2 training samples",
        {**LABELS, "split.labels-per-silo": 2, "split.silo-train-size": 1},
        {"raise 'split.silo-train-size' to at least 2": {"split.silo-train-size": 2}},
    ),
]


def load(values: Values) -> None:
    settings = resolve(as_keys({"method": "fedavg", **values})).common
    load_silo(silo_names(settings)[0], settings)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_refused_silos_with_fix_load(case: Case) -> None:
    check(case, load)


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        ("mnist", "needs files, but no data directory is named"),
        ("cifar10", "needs files, but no data directory is named"),
        ("table", "needs a folder with schema.yaml"),
        ("images", "needs a folder with images.yaml"),
        ("isic2019", "needs a folder isic2019"),
        ("mini-mias", "needs a folder mini_mias"),
    ],
)
def test_data_with_named_folder_load(
    dataset: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSILO_DATA", raising=False)
    write_data(dataset, tmp_path)
    values = {
        "dataset": dataset,
        "data.cache-dir": str(tmp_path / "cache"),
        **SMALL.get(dataset, {}),
    }
    said = refused(lambda: load(values))
    assert told in said
    assert "set 'data.dir' or $FEDSILO_DATA" in said
    assert not refused(lambda: load({**values, "data-dir": str(tmp_path)}))
    monkeypatch.setenv("FEDSILO_DATA", str(tmp_path))
    assert not refused(lambda: load(values))


@pytest.mark.parametrize("part", ["val", "test"])
def test_manifest_with_split_loads_without_folds_or_in_train(part: str, tmp_path: Path) -> None:
    write_images(tmp_path, "images.yaml")

    def write(given: str) -> None:
        for site in SITES:
            parts = ["train"] * 12 + [given] * 4
            lines = [f"{n}.png,{'ab'[n % 2]},{one}" for n, one in enumerate(parts)]
            (tmp_path / site / "list.csv").write_text("\n".join(["path,label,split", *lines]))

    values: Values = {"dataset": "images", "data.dir": str(tmp_path), f"{part}-folds": 2}
    write(part)
    said = refused(lambda: load(values))
    assert (
        f"gives {part} images itself: set 'split.{part}-folds' to 0, or put them into 'tra" in said
    )
    assert not refused(lambda: load({**values, f"{part}-folds": 0}))
    write("train")
    assert not refused(lambda: load(values))


def test_silos_with_more_data_or_fewer_silos_load(
    tmp_path: Path,
) -> None:
    values: Values = {"dataset": "cifar10", "split.silos": 12, "split.silo-test-size": 1}
    values = {**values, "split.silo-train-size": 110, "data.dir": str(tmp_path)}
    write_data("cifar10", tmp_path)  # 100 training images
    assert refused(lambda: load(values)).endswith("lower 'split.silos' or take more data")
    said = refused(lambda: load({**values, "silos": 10}))
    assert said.endswith("what fits is 'split.silo-train-size' 10 for 10 silos")
    assert not refused(lambda: load({**values, "split.silos": 10, "split.silo-train-size": 10}))
    folder = tmp_path / "cifar-10-batches-bin"
    batch = (folder / "data_batch_1.bin").read_bytes()
    (folder / "data_batch_3.bin").write_bytes(batch * 24)
    assert not refused(lambda: load(values))


def test_silo_of_more_than_one_track_loads(tmp_path: Path) -> None:
    root = write_gtsrb(tmp_path, classes=1, tracks=1, frames=40)
    other = root / "Final_Training" / "Images" / "00001"
    write_signs(other, other / "GT-00001.csv", ["00000_00000.ppm"], [1])
    values: Values = {
        "dataset": "gtsrb",
        "split.silos": 1,
        "split.silo-train-size": 10,
        "split.silo-test-size": 1,
    }
    values = {**values, "data-dir": str(tmp_path)}
    said = refused(lambda: load(values))
    assert "all 10 training images are frames of one track" in said
    assert "raise 'split.silo-train-size'" in said
    assert not refused(lambda: load({**values, "split.silo-train-size": 41}))


def test_table_of_two_rows_with_more_rows_or_no_test_part_loads(tmp_path: Path) -> None:
    values: Values = {"dataset": "table", "data.dir": str(tmp_path)}
    write_tables(tmp_path, rows=2)
    said = refused(lambda: load(values))
    assert "2 rows are too few for a test part of 0.34: add rows, or in the schema" in said
    with (tmp_path / "schema.yaml").open("a") as schema:
        schema.write("test-share: 0\n")
    assert not refused(lambda: load(values))
    write_tables(tmp_path, rows=12)
    assert not refused(lambda: load(values))


@pytest.mark.parametrize(
    ("fix", "file", "good", "bad"),
    [
        ("correct the file", "north.csv", "record,age,kind,ill", "record,years,kind,ill"),
        (
            "declare surplus columns as 'ignored'",
            "schema.yaml",
            "  - {name: record, kind: ignored}\n",
            "",
        ),
        ("set the schema's 'header' to false", "schema.yaml", "header: false\n", ""),
    ],
)
def test_table_with_schemas_header_loads(
    fix: str, file: str, good: str, bad: str, tmp_path: Path
) -> None:
    write_tables(tmp_path)
    schema = tmp_path / "schema.yaml"
    if "header" in fix:
        lines = (tmp_path / "north.csv").read_text().splitlines()[1:]
        cells = [line.split(",") for line in lines]  # in the order of the schema, with no names
        rows = [",".join((age, kind, record, ill)) for record, age, kind, ill in cells]
        (tmp_path / "north.csv").write_text("\n".join(rows) + "\n")
        schema.write_text(f"header: false\n{schema.read_text()}")
    whole = (tmp_path / file).read_text()
    assert good in whole
    (tmp_path / file).write_text(whole.replace(good, bad))
    values: Values = {"dataset": "table", "data.dir": str(tmp_path)}
    said = refused(lambda: load(values))
    assert "the first line does not name the schema's columns" in said
    assert fix in said
    (tmp_path / file).write_text(whole)
    assert not refused(lambda: load(values))
