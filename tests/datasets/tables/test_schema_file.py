from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsilo.datasets.tables.parsing import Column, TableSchema
from fedsilo.datasets.tables.schema_file import read_schema
from fedsilo.models.contract.errors import DataError

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
    assert read_schema(write(tmp_path, GOOD)) == TableSchema(
        columns=(
            Column("age", "numeric", (), 55.0, 10.5),
            Column("pain", "categorical", ("1", "2", "x")),
            Column("room", "ignored"),
        ),
        label="sick",
        classes={"healthy": ("0",), "ill": ("1", "2")},
        missing=("", "?"),
        policy="drop",
        header=True,
        delimiter=",",
        sites={"north": "north.csv", "south": "s.csv"},
        test_share=0.34,
        split_seed=43,
    )


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
    assert schema.missing == ("NA", "-9")
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
        ("label", "sick", "'label' must be a mapping with the keys column, classes"),
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
        ("columns.1.levels", [1], "column 'pain' has one level only"),
        ("columns.0.std", ..., "column 'age' declares one of 'mean' and 'std'"),
        ("columns.0.mean", ..., "column 'age' declares one of 'mean' and 'std'"),
        ("columns.0.std", 0, "'columns', item 1, 'std' must be a number from 1e-12"),
        ("columns.0.std", -1.5, "'columns', item 1, 'std' must be a number"),
        ("columns.0.mean", "55", "'columns', item 1, 'mean' must be a number"),
        ("columns.0.mean", True, "'columns', item 1, 'mean' must be a number"),
        ("columns.0.mean", float("nan"), "'columns', item 1, 'mean' must be a number"),
        ("columns.0.std", float("inf"), "'columns', item 1, 'std' must be a number"),
        ("columns.1.name", "age", "two columns have one name, or the label stands among"),
        ("label.column", "age", "two columns have one name, or the label stands among"),
        ("columns", [{"name": "a", "kind": "ignored"}], "no column is 'numeric' or 'categorical'"),
        ("columns", [], "no column is 'numeric' or 'categorical'"),
        ("label.classes", [0, 1], "'classes' must map at least two class names to lists"),
        ("label.classes", {"ill": [1]}, "'classes' must map at least two class names to lists"),
        ("label.classes.ill", 1, "'label', 'classes', 'ill' must be a list"),
        ("label.classes.ill", [1, 0], "under 'classes' each label value must stand once"),
        ("label.classes.ill", ["0.0"], "under 'classes' each label value must stand once"),
        ("label.classes.ill", [], "under 'classes' each label value must stand once"),
        (
            "missing",
            [None],
            "'missing', item 1 must be a text or a number; of words such as yes",
        ),
        ("columns.0.name", True, "'columns', item 1, 'name' must be a text or a number; of words"),
        ("label.classes", {1: [0], "1": [1]}, "under 'classes' two names are the same text"),
        ("sites", {"north": ["a.csv"]}, "'sites', 'north' must be a text or a number; of words"),
        ("sites", {}, "'sites' must map each site's name to its CSV file"),
        ("sites", {"all": "a.csv"}, "site 'all' is no plain name of letters, digits, '.', '_' "),
        ("sites", {"north": "n.csv", "a/b": "s.csv"}, "site 'a/b' is no plain name of letters"),
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
        with pytest.raises(DataError, match=rf"schema\.yaml has the key '{new[:-1]}' twice \(line"):
            read_schema(write(tmp_path, text.replace(old, new)))


@pytest.mark.parametrize("content", ["", "- a\n- b\n", "text"])
def test_a_file_that_is_no_mapping_is_refused_with_the_keys(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(DataError, match=r"schema\.yaml: the schema must be a mapping with the k"):
        read_schema(path)


def test_a_file_that_is_missing_or_no_yaml_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.yaml cannot be read"):
        read_schema(tmp_path / "absent.yaml")
    with pytest.raises(DataError, match=r"schema\.yaml is no valid YAML") as caught:
        read_schema(write(tmp_path, "columns: [\nlabel: }"))
    assert "\n" not in str(caught.value)
