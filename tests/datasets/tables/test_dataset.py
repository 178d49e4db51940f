from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedsilo.datasets.io.locations import Places
from fedsilo.datasets.registry import load_silo, silo_names
from fedsilo.datasets.silo.silos import SPLITS, Silo, fingerprint
from fedsilo.datasets.tables.parsing import TableSchema
from fedsilo.datasets.tables.schema_file import read_schema
from fedsilo.models.contract.errors import DataError
from fedsilo.models.contract.settings import CommonSettings

TABLE = CommonSettings(dataset="table")
SCHEMA = """\
columns:
  - {name: id}
  - {name: sex, kind: categorical, levels: [f, m]}
label: {column: sick, classes: {healthy: [0], ill: [1]}}
sites: {north: north.csv, south: south.csv}
"""


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """Return a data folder of two hospitals whose patients are numbered; north lacks one's sex."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "schema.yaml").write_text(SCHEMA)
    for site, first, count in (("north", 0, 20), ("south", 100, 9)):
        rows = [f"{first + i},{'fm'[i % 2]},{int(i % 3 == 0)}\n" for i in range(count)]
        if site == "north":
            rows[7] = "7,?,0\n"
        (folder / f"{site}.csv").write_text("id,sex,sick\n" + "".join(rows))
    return Places(folder, tmp_path / "cache")


def patients(silo: Silo) -> list[list[int]]:
    """Return the numbers of the patients of each part."""
    return [[int(row[0]) for row in split.inputs.tolist()] for split in silo.splits().values()]


def cached(places: Places) -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns for p in places.cache.rglob("*") if p.is_file()}


def _schema_of(places: Places) -> TableSchema:
    assert places.data is not None
    return read_schema(places.data / "schema.yaml")


def rewrite(places: Places, name: str, change: Callable[[str], str]) -> None:
    assert places.data is not None
    path = places.data / name
    path.write_text(change(path.read_text()))


def test_a_silo_is_a_hospitals_own_file_read_by_the_common_schema(places: Places) -> None:
    silo = load_silo("north", TABLE, places)
    assert (silo.name, silo.distribution) == ("north", "north")
    assert (silo.features, silo.classes) == (("id", "sex=m"), ("healthy", "ill"))
    assert (silo.task.input_shape, silo.task.classes) == ((2,), 2)
    assert silo.dropped == 1
    assert silo.declared is None
    train, val, test = patients(silo)
    assert val == []
    assert sorted(train + test) == [i for i in range(20) if i != 7]
    for split in silo.splits().values():
        assert (split.inputs.dtype, split.labels.dtype) == (torch.float32, torch.int64)
        assert split.inputs.shape[1:] == (2,)
        for row, label in zip(split.inputs.tolist(), split.labels.tolist(), strict=True):
            assert row[1] == row[0] % 2
            assert label == int(row[0] % 3 == 0)


def test_a_third_rounded_up_is_test_data_and_each_part_has_its_fingerprint(places: Places) -> None:
    silo = load_silo("south", TABLE, places)
    assert [len(part) for part in silo.splits().values()] == [5, 0, 4]
    assert silo.label_counts() == {"train": [3, 2], "val": [0, 0], "test": [3, 1]}
    for name in SPLITS:
        split = silo.splits()[name]
        content = split.inputs.numpy().tobytes() + split.labels.numpy().tobytes()
        assert silo.fingerprints[name] == hashlib.sha256(content).hexdigest()


def test_rows_are_as_they_were_read_with_gaps_where_missing_values_are_imputed(
    places: Places,
) -> None:
    rewrite(places, "schema.yaml", lambda text: text + "policy: impute\n")
    silo = load_silo("north", TABLE, places)
    assert silo.dropped == 0
    rows = torch.cat([split.inputs for split in silo.splits().values()])
    assert sorted(rows[:, 0].tolist()) == list(range(20))
    assert rows[rows[:, 1].isnan(), 0].tolist() == [7.0]


def test_the_schema_names_the_silos_in_its_order(places: Places) -> None:
    settings = dataclasses.replace(TABLE, data_dir=str(places.data))
    assert silo_names(settings) == ["north", "south"]
    rewrite(places, "schema.yaml", lambda t: t.replace("{north: north.csv, ", "{z: north.csv, "))
    assert silo_names(settings) == ["z", "south"]


def test_declared_figures_of_the_schema_come_with_the_silo(places: Places) -> None:
    rewrite(places, "schema.yaml", lambda t: t.replace("{name: id}", "{name: id, mean: 9, std: 2}"))
    for _ in range(2):  # as made, and as cached
        declared = load_silo("north", TABLE, places).declared
        assert declared is not None
        assert declared.mean.tolist() == [9, 0.5]
        assert declared.std.tolist() == [2, 1]


def test_folds_and_their_choice_are_those_of_the_settings(places: Places) -> None:
    found = [
        patients(
            load_silo(
                "south",
                dataclasses.replace(TABLE, test_folds=3, test_fold=fold, val_folds=2),
                places,
            )
        )
        for fold in range(3)
    ]
    assert sorted(row for _, _, test in found for row in test) == list(range(100, 109))
    for train, val, test in found:
        assert sorted(train + val + test) == list(range(100, 109))
        assert [len(train), len(val), len(test)] == [3, 3, 3]


def test_without_test_data_the_training_data_are_the_same(places: Places) -> None:
    whole = load_silo("north", TABLE, places)
    chosen = load_silo("north", dataclasses.replace(TABLE, use_test=False), places)
    assert len(chosen.test) == 0
    assert len(whole.test) > 0
    assert chosen.fingerprints["train"] == whole.fingerprints["train"]


def test_a_second_load_reads_the_cache(places: Places) -> None:
    first = load_silo("north", TABLE, places)
    files = cached(places)
    other = dataclasses.replace(TABLE, seed=99, standardise="site", sums_min_count=3)
    again = load_silo("north", other, places)
    assert cached(places) == files
    assert len(files) == 8  # inputs and labels of three parts, what is said of them, a seal
    assert again.fingerprints == first.fingerprints
    assert patients(again) == patients(first)
    for one in (first, again):
        assert (one.features, one.classes) == (("id", "sex=m"), ("healthy", "ill"))
        assert (one.dropped, one.schema) == (1, _schema_of(places).digest())


def test_no_one_but_the_owner_can_enter_a_cached_silo(places: Places) -> None:
    before = os.umask(0o002)
    try:
        load_silo("north", TABLE, places)
    finally:
        os.umask(before)
    folders = {path.parent for path in cached(places)}
    assert [oct(folder.stat().st_mode & 0o777) for folder in folders] == ["0o700"]


def test_a_changed_file_makes_another_silo_even_with_the_old_size_and_time(
    places: Places,
) -> None:
    assert places.data is not None
    path = places.data / "north.csv"
    first, before = load_silo("north", TABLE, places), path.stat()
    rewrite(places, "north.csv", lambda text: text.replace("\n3,m,1", "\n3,m,0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    changed = load_silo("north", TABLE, places)
    sick = [sum(counts[1] for counts in one.label_counts().values()) for one in (first, changed)]
    assert sick == [7, 6]


@pytest.mark.parametrize(
    ("before", "change"),
    [
        ({}, {"test_folds": 4}),
        ({"test_folds": 4}, {"test_fold": 1}),
        ({"test_folds": 4}, {"fold_seed": 5}),
        ({}, {"val_folds": 3}),
        ({"val_folds": 3}, {"val_fold": 1}),
        ({"val_folds": 3}, {"fold_seed": 5}),
        ({}, {"use_test": False}),
    ],
    ids=str,
)
def test_other_folds_make_another_silo_beside_the_first(
    places: Places, before: dict[str, int], change: dict[str, int]
) -> None:
    one = dataclasses.replace(TABLE, **before)  # type: ignore[arg-type]  # field by field
    other = dataclasses.replace(one, **change)  # type: ignore[arg-type]
    first = patients(load_silo("north", one, places))
    assert patients(load_silo("north", other, places)) != first
    assert patients(load_silo("north", one, places)) == first


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("healthy: [0], ill: [1]", "ill: [1], healthy: [0]"),
        ("label:", "test-share: 0.5\nlabel:"),
        ("label:", "split-seed: 44\nlabel:"),
        ("label:", "policy: impute\nlabel:"),
        ("levels: [f, m]", "levels: [m, f]"),
    ],
)
def test_another_schema_makes_another_silo(places: Places, old: str, new: str) -> None:
    first = load_silo("north", TABLE, places)
    rewrite(places, "schema.yaml", lambda text: text.replace(old, new))
    assert load_silo("north", TABLE, places).fingerprints != first.fingerprints


def test_a_damaged_cache_is_made_anew(places: Places) -> None:
    before = load_silo("north", TABLE, places)
    target = next(path for path in cached(places) if path.name == "train-inputs.npy")
    target.write_bytes(target.read_bytes()[:50])
    silo = load_silo("north", TABLE, places)
    assert silo.fingerprints == before.fingerprints
    assert fingerprint(silo.train) == before.fingerprints["train"]


def test_a_site_that_the_schema_does_not_name_is_answered_with_those_it_does(
    places: Places,
) -> None:
    with pytest.raises(DataError, match="no silo 'east': 2 silos are north, south"):
        load_silo("east", TABLE, places)
    assert cached(places) == {}


def test_a_site_needs_its_own_file_alone_and_says_which_is_missing(places: Places) -> None:
    assert places.data is not None
    (places.data / "south.csv").unlink()
    assert load_silo("north", TABLE, places).name == "north"
    with pytest.raises(DataError, match=r"data/south\.csv cannot be read: No such file"):
        load_silo("south", TABLE, places)


def test_without_a_data_folder_or_schema_the_user_is_told_what_to_put_where(
    places: Places,
) -> None:
    with pytest.raises(DataError, match=r"'table' needs a folder with schema\.yaml.*'data-dir'"):
        load_silo("north", TABLE, dataclasses.replace(places, data=None))
    assert places.data is not None
    (places.data / "schema.yaml").unlink()
    with pytest.raises(DataError, match=r"data/schema\.yaml cannot be read"):
        load_silo("north", TABLE, places)


def test_a_bad_row_names_the_file_and_caches_nothing(places: Places) -> None:
    rewrite(places, "north.csv", lambda text: text + "20,divers,1\n")
    said = r"data/north\.csv, line 22, column 'sex': this is none of the declared levels"
    with pytest.raises(DataError, match=said) as caught:
        load_silo("north", TABLE, places)
    assert "divers" not in str(caught.value)
    assert cached(places) == {}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("1,f,0\n2,?,1\n3,?,1\n", r"1 training rows are left \(2 rows were dropped.*'impute'"),
        ("", r"0 training rows are left \(0 rows were dropped"),
    ],
)
def test_too_few_training_rows_are_refused_with_the_rows_that_were_dropped(
    places: Places, rows: str, said: str
) -> None:
    rewrite(places, "schema.yaml", lambda text: text + "test-share: 0\n")
    rewrite(places, "south.csv", lambda _: "id,sex,sick\n" + rows)
    with pytest.raises(DataError, match=rf"data/south\.csv: {said}"):
        load_silo("south", TABLE, places)
    assert cached(places) == {}


def test_two_training_rows_are_enough(places: Places) -> None:
    rewrite(places, "schema.yaml", lambda text: text + "test-share: 0\n")
    rewrite(places, "south.csv", lambda _: "id,sex,sick\n1,f,0\n2,m,1\n")
    assert patients(load_silo("south", TABLE, places)) == [[1, 2], [], []]
