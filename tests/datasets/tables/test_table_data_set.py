import copy
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.core.errors import DataError
from fedsilo.core.files.locations import Places
from fedsilo.core.settings.common_settings import CommonSettings
from fedsilo.datasets.registry import data_set, load_silo, silo_names
from fedsilo.datasets.silo.silos import SPLITS, Silo, fingerprint, log_once
from fedsilo.datasets.tables.schema import TableSchema, read_schema
from tests.support.data_folders import rewrite
from tests.support.errors import refuses

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


def test_a_silo_is_a_hospitals_own_file_read_by_the_common_schema(places: Places) -> None:
    silo = load_silo("north", TABLE, places)
    assert (silo.name, silo.distribution) == ("north", "north")
    assert (silo.features, silo.classes) == (("id", "sex=m"), ("healthy", "ill"))
    assert (silo.shape.input_shape, silo.shape.outputs) == ((2,), 2)
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


def test_declared_statistics_of_the_schema_come_with_the_silo(places: Places) -> None:
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
    with refuses(DataError, "east", "2", "north", "south"):
        load_silo("east", TABLE, places)
    assert cached(places) == {}


def test_a_site_needs_its_own_file_alone_and_says_which_is_missing(places: Places) -> None:
    assert places.data is not None
    (places.data / "south.csv").unlink()
    assert load_silo("north", TABLE, places).name == "north"
    with refuses(DataError, "data/south.csv"):
        load_silo("south", TABLE, places)


def test_without_a_data_folder_or_schema_the_user_is_told_what_to_put_where(
    places: Places,
) -> None:
    with refuses(DataError, "table", "schema.yaml", "data.dir"):
        load_silo("north", TABLE, dataclasses.replace(places, data=None))
    assert places.data is not None
    (places.data / "schema.yaml").unlink()
    with refuses(DataError, "data/schema.yaml"):
        load_silo("north", TABLE, places)


def test_a_bad_row_names_the_file_and_caches_nothing(places: Places) -> None:
    rewrite(places, "north.csv", lambda text: text + "20,divers,1\n")
    said = r"data/north\.csv, line 22, column 'sex': this is not one of the declared levels"
    with pytest.raises(DataError, match=said) as caught:
        load_silo("north", TABLE, places)
    assert "divers" not in str(caught.value)
    assert cached(places) == {}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("1,f,0\n2,?,1\n3,?,1\n", r" \(2 rows left out\): 1 training rows are left.*'impute'"),
        ("", ": 0 training rows are left"),
    ],
)
def test_too_few_training_rows_are_refused_with_the_rows_that_were_dropped(
    places: Places, rows: str, said: str
) -> None:
    rewrite(places, "schema.yaml", lambda text: text + "test-share: 0\n")
    rewrite(places, "south.csv", lambda _: "id,sex,sick\n" + rows)
    with pytest.raises(DataError, match=rf"data/south\.csv{said}"):
        load_silo("south", TABLE, places)
    assert cached(places) == {}


def test_a_site_all_of_whose_rows_lack_a_value_is_told_so(places: Places) -> None:
    rewrite(places, "south.csv", lambda _: "id,sex,sick\n" + "1,?,0\n" * 5)
    with refuses(DataError, "south.csv", "5", "0"):
        load_silo("south", TABLE, places)


def test_two_training_rows_are_enough(places: Places) -> None:
    rewrite(places, "schema.yaml", lambda text: text + "test-share: 0\n")
    rewrite(places, "south.csv", lambda _: "id,sex,sick\n1,f,0\n2,m,1\n")
    assert patients(load_silo("south", TABLE, places)) == [[1, 2], [], []]


GOOD: dict[str, Any] = {
    "columns": [
        {"name": "age", "mean": 55, "std": 10.5},
        {"name": "pain", "kind": "categorical", "levels": [1, 2.0, "x"]},
        {"name": "room", "kind": "ignored"},
    ],
    "label": {"column": "sick", "classes": {"healthy": [0], "ill": [1, "2.0"]}},
    "sites": {"north": "north.csv", "south": "s.csv"},
}


def write(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "schema.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def changed(where: str, value: Any) -> dict[str, Any]:
    """Return the good schema with another value at a dotted place, or with the place gone."""
    content = copy.deepcopy(GOOD)
    inner: Any = content
    *path, last = (int(part) if part.isdigit() else part for part in where.split("."))
    for part in path:
        inner = inner[part]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return content


def test_a_schema_is_read_with_levels_and_labels_as_texts_of_one_form(tmp_path: Path) -> None:
    bare = {"kind": "numeric", "levels": [], "mean": None, "std": None, "edges": [], "range": []}
    assert read_schema(write(tmp_path, GOOD)).key() == {
        "columns": [
            {**bare, "name": "age", "mean": 55.0, "std": 10.5},
            {**bare, "name": "pain", "kind": "categorical", "levels": ["1", "2", "x"]},
            {**bare, "name": "room", "kind": "ignored"},
        ],
        "label": "sick",
        "classes": {"healthy": ["0"], "ill": ["1", "2"]},
        "missing": ["", "?"],
        "policy": "drop",
        "header": True,
        "delimiter": ",",
        "sites": {"north": "north.csv", "south": "s.csv"},
        "test_share": 0.34,
        "split_seed": 43,
    }


def test_every_key_that_is_given_is_taken(tmp_path: Path) -> None:
    own = {
        "missing": ["NA", -9],
        "policy": "impute",
        "header": False,
        "delimiter": "\t",
        "test-share": 0,
        "split-seed": 7,
    }
    schema = read_schema(write(tmp_path, GOOD | own))
    assert schema.missing == ["NA", "-9"]
    assert (schema.policy, schema.header, schema.delimiter) == ("impute", False, "\t")
    assert (schema.test_share, schema.split_seed) == (0.0, 7)


def test_classes_keep_the_order_of_the_file(tmp_path: Path) -> None:
    text = yaml.safe_dump(changed("label.classes", {}), sort_keys=False)
    path = write(tmp_path, text.replace("classes: {}", "classes: {z: [1], a: [0]}"))
    assert list(read_schema(path).classes) == ["z", "a"]


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        ("columns", ..., "the schema lacks the key 'columns'"),
        ("label", ..., "the schema lacks the key 'label'"),
        ("sites", ..., "the schema lacks the key 'sites'"),
        ("label.column", ..., "'label' lacks the key 'column'"),
        ("label.classes", ..., "'label' lacks the key 'classes'"),
        ("columns.0.name", ..., "a column lacks the key 'name'"),
        ("polcy", "drop", "the schema has the unknown key 'polcy'; did you mean 'policy'?"),
        ("zzz", 1, "the schema has the unknown key 'zzz'; allowed: columns, label, missing"),
        ("columns.0.lvels", [], "a column has the unknown key 'lvels'; did you mean 'levels'?"),
        ("label.class", {}, "'label' has the unknown key 'class'; did you mean 'classes'?"),
        ("label", "sick", "'label' must be a mapping with the keys column, task, classes"),
        ("columns.0", "age", "a column must be a mapping with the keys name, kind, levels"),
        ("columns", {"age": 1}, "'columns' must be a list"),
        ("columns", None, "'columns' must be a list"),
        ("columns.1.levels", "1, 2", "'columns', item 2, 'levels' must be a list"),
        ("missing", "NA", "'missing' must be a list"),
        ("columns.0.kind", "number", "'columns', item 1, 'kind' must be 'numeric', 'categ"),
        ("columns.1.levels", ..., "column 'pain' is categorical with 0 levels"),
        (
            "columns.1.levels",
            [1, 2, "2.0"],
            "column 'pain' is categorical with 3 levels, of which 2",
        ),
        ("columns.0.levels", [1, 2], "column 'age' is numeric with 2 levels"),
        ("columns.2.levels", [1, 2], "column 'room' is ignored with 2 levels"),
        ("columns.1.levels", [1], "column 'pain' has only one level"),
        ("columns.0.std", ..., "column 'age' declares one of 'mean' and 'std'"),
        ("columns.0.mean", ..., "column 'age' declares one of 'mean' and 'std'"),
        ("columns.0.std", 0, "'columns', item 1, 'std' must be a number from 1e-12"),
        ("columns.0.std", -1.5, "'columns', item 1, 'std' must be a number"),
        ("columns.0.mean", "55", "'columns', item 1, 'mean' must be a number"),
        ("columns.0.mean", True, "'columns', item 1, 'mean' must be a number"),
        ("columns.0.mean", float("nan"), "'columns', item 1, 'mean' must be a number"),
        ("columns.0.std", float("inf"), "'columns', item 1, 'std' must be a number"),
        ("columns.1.unmeasured", [1], "column 'pain' is categorical, but has 'unmeasured' or"),
        ("columns.2.indicator", True, "column 'room' is ignored, but has 'unmeasured' or 'indic"),
        ("columns.0.indicator", True, "column 'age' has an 'indicator' that would always be 0"),
        ("columns.0.unmeasured", 0, "'columns', item 1, 'unmeasured' must be a list"),
        ("columns.0.indicator", 1, "'columns', item 1, 'indicator' must be true or false"),
        (
            "columns.0.name",
            "age>=5",
            "column 'age>=5' has '=' in its name, as levels do: rename it",
        ),
        ("columns.1.name", "age", "two columns have one name, or the label is among"),
        ("label.column", "age", "two columns have one name, or the label is among"),
        ("columns", [{"name": "a", "kind": "ignored"}], "no column is 'numeric' or 'categorical'"),
        ("columns", [], "no column is 'numeric' or 'categorical'"),
        ("label.classes", [0, 1], "'classes' must map at least two class names to lists"),
        ("label.classes", {"ill": [1]}, "'classes' must map at least two class names to lists"),
        ("label.classes.ill", 1, "'label', 'classes', 'ill' must be a list"),
        ("label.classes.ill", [1, 0], "under 'classes' each label value must appear once"),
        ("label.classes.ill", ["0.0"], "under 'classes' each label value must appear once"),
        ("label.classes.ill", [], "under 'classes' each label value must appear once"),
        (
            "missing",
            [None],
            "'missing', item 1 must be a text or a number; YAML reads words such as yes",
        ),
        (
            "columns.0.name",
            True,
            "'columns', item 1, 'name' must be a text or a number; YAML reads words",
        ),
        ("label.classes", {1: [0], "1": [1]}, "under 'classes' two names are the same text"),
        (
            "sites",
            {"north": ["a.csv"]},
            "'sites', 'north' must be a text or a number; YAML reads words",
        ),
        ("sites", {}, "'sites' must map each site's name to its CSV file"),
        ("sites", {"all": "a.csv"}, "site 'all' must have another name"),
        ("sites", {"north": "n.csv", "a/b": "s.csv"}, "'a/b' cannot be a site's name"),
        ("sites", ["north"], "'sites' must map each site's name to its CSV file"),
        ("policy", "mean", "'policy' must be 'drop' or 'impute'"),
        ("header", "no", "'header' must be true or false"),
        ("delimiter", "||", "'delimiter' must be one character"),
        ("delimiter", "", "'delimiter' must be one character"),
        ("test-share", 0.95, "'test-share' must be a number from 0.0 to 0.9"),
        ("test-share", -0.1, "'test-share' must be a number"),
        ("test-share", "third", "'test-share' must be a number"),
        ("split-seed", -1, "'split-seed' must be a whole number from 0 to 2^32 - 1"),
        ("split-seed", 1.5, "'split-seed' must be a whole number"),
        ("split-seed", True, "'split-seed' must be a whole number"),
    ],
)
def test_a_wrong_schema_is_refused_with_its_file_and_key(
    tmp_path: Path, where: str, value: Any, said: str
) -> None:
    path = write(tmp_path, changed(where, value))
    with pytest.raises(DataError, match=re.escape(f"{path}: {said}")) as caught:
        read_schema(path)
    assert "\n" not in str(caught.value)


@contextmanager
def refused_without(value: str) -> Iterator[None]:
    """Let an error pass whose text is one line without ``value``."""
    try:
        yield
    except DataError as error:
        told = str(error)
        assert value not in told  # a value that is allowed raises nothing
        assert "\n" not in told
        raise


@pytest.mark.parametrize(
    "where",
    [
        *("columns", "columns.0", "columns.0.kind", "columns.0.levels", "columns.0.mean"),
        *("columns.1.levels", "label", "label.column", "label.classes", "label.classes.ill"),
        *("missing", "policy", "header", "delimiter", "sites", "sites.north", "test-share"),
        "split-seed",
    ],
)
@pytest.mark.parametrize("value", ["Müller 1950", ["Müller 1950", None], [["Müller 1950"]]])
def test_no_value_stands_in_an_error(tmp_path: Path, where: str, value: Any) -> None:
    with suppress(DataError), refused_without("Müller"):
        read_schema(write(tmp_path, changed(where, value)))


def test_a_key_that_stands_twice_is_refused_at_any_depth(tmp_path: Path) -> None:
    text = yaml.safe_dump(GOOD)
    for old, new in (("ill:", "healthy:"), ("south:", "north:"), ("std:", "mean:")):
        assert old in text
        with refuses(DataError, "schema.yaml", new[:-1]):
            read_schema(write(tmp_path, text.replace(old, new)))


@pytest.mark.parametrize("content", ["", "- a\n- b\n", "text"])
def test_a_file_that_is_no_mapping_is_refused_with_the_keys(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, content)
    with refuses(DataError, "schema.yaml"):
        read_schema(path)


def test_a_file_that_is_missing_or_no_yaml_is_refused_in_one_line(tmp_path: Path) -> None:
    with refuses(DataError, "absent.yaml"):
        read_schema(tmp_path / "absent.yaml")
    with refuses(DataError, "schema.yaml") as caught:
        read_schema(write(tmp_path, "columns: [\nlabel: }"))
    assert "\n" not in str(caught.value)


def test_copies_of_a_row_are_in_one_part(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(places, "north.csv", lambda text: text + "".join(text.splitlines(True)[1:]))
    silo = load_silo("north", TABLE, places)
    train, _, test = patients(silo)
    assert test
    assert not set(train) & set(test)
    assert len(train) + len(test) == 38
    assert "19 of 38 rows are copies of another" in caplog.text


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("fm")), min_size=6, max_size=40))
def test_equal_rows_never_are_on_both_sides_of_a_split(rows: list[tuple[int, str]]) -> None:
    with TemporaryDirectory() as home:
        data = Path(home) / "data"
        data.mkdir()
        (data / "schema.yaml").write_text(SCHEMA)
        lines = [f"{number},{sex},{number % 2}\n" for number, sex in rows]
        (data / "north.csv").write_text("id,sex,sick\n" + "".join(lines))
        try:
            silo = load_silo("north", TABLE, Places(data, Path(home) / "cache"))
        except DataError:
            return  # one group, or one training row
        train, test = (
            {tuple(row) for row in split.inputs.tolist()} for split in (silo.train, silo.test)
        )
        assert not train & test
        assert len(silo.train) + len(silo.test) == len(rows)


RANGE = "{name: id, unit: mg/dl, range: [3, 110]}"


def test_rows_out_of_range_are_left_out_and_counted_at_each_start(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(places, "schema.yaml", lambda text: text.replace("{name: id}", RANGE))
    for _ in range(2):  # the second time the silo comes from the cache
        log_once.cache_clear()
        caplog.clear()
        silo = load_silo("north", TABLE, places)
        assert silo.dropped == 4  # 0, 1 and 2 are too small, and 7 lacks the sex
        assert min(id_ for part in patients(silo) for id_ in part) == 3
        assert "left out: 3 of id" in caplog.text
    data = data_set("table")
    assert data.left_out(silo, TABLE, places).missing == {"id": 3, "sex": 1, "sick": 0}
    (measure, _) = data.measures(silo, TABLE, places)
    assert min(values.min() for values in measure.values.values() if len(values)) == 3


def test_rows_out_of_range_are_kept_if_the_schema_says_so(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    before = load_silo("north", TABLE, places).fingerprints
    kept = SCHEMA.replace("{name: id}", RANGE) + "out-of-range: keep\n"
    rewrite(places, "schema.yaml", lambda _: kept)
    assert load_silo("north", TABLE, places).fingerprints == before
    assert "kept: 3 of id" in caplog.text


def test_sites_whose_units_differ_have_other_schemas(places: Places) -> None:
    digests = set()
    for unit in ("mg/dl", "mmol/l", '""'):
        schema = SCHEMA.replace("{name: id}", f"{{name: id, unit: {unit}}}")
        (places.cache.parent / "data" / "schema.yaml").write_text(schema)
        digests.add(load_silo("north", TABLE, places).schema)
    assert len(digests) == 3


@pytest.mark.parametrize(
    "column",
    [
        {"unit": "kg", "kind": "categorical", "levels": [1, 2]},
        {"level-names": {3: "none"}, "kind": "categorical", "levels": [1, 2]},
        {"level-names": {1: "typical"}},
    ],
)
def test_words_that_fit_no_column_are_refused(column: dict[str, Any], tmp_path: Path) -> None:
    with refuses(DataError, "schema.yaml", "age"):
        read_schema(write(tmp_path, changed("columns.0", {"name": "age", **column})))
