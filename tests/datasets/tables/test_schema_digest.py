"""The digest of a schema: what all sites must share changes it, what is a site's own does not."""

from pathlib import Path
from typing import Any

import pytest

from fedsilo.core.files.locations import Places
from fedsilo.datasets.tables.heart import HEART
from fedsilo.datasets.tables.schema import Column, Label, TableSchema

CLASSES = {"healthy": ["0"], "ill": ["1", "2"]}
SCHEMA = TableSchema.model_validate(
    {
        "columns": [
            {"name": "age", "mean": 50.0, "std": 10.0},
            {"name": "stage", "kind": "categorical", "levels": [1, 2, 3]},
            {"name": "note", "kind": "ignored"},
        ],
        "label": {"column": "sick", "classes": CLASSES},
        "sites": {"north": "north.csv"},
    }
)
AGE, STAGE, NOTE = SCHEMA.columns


def columns(*chosen: Column) -> dict[str, Any]:
    return {"columns": list(chosen)}


def classes(**listed: list[str]) -> dict[str, Any]:
    return {"label": Label(column="sick", classes=listed)}


def test_the_digest_is_a_sha256_and_the_same_for_an_equal_schema() -> None:
    digest = SCHEMA.digest()
    assert len(digest) == 64
    assert set(digest) <= set("0123456789abcdef")
    twin = SCHEMA.model_copy(deep=True)
    assert twin.digest() == digest


@pytest.mark.parametrize(
    "change",
    [
        {"sites": {"south": "s.csv", "north": "n.csv"}},
        {"header": False},
        {"delimiter": ";"},
        {"test_share": 0.0},
        {"split_seed": 44},
        {"missing": ("?", "")},  # in another order
    ],
    ids=str,
)
def test_what_is_a_sites_own_leaves_the_digest_as_it_is(change: dict[str, Any]) -> None:
    assert SCHEMA.model_copy(update=change).digest() == SCHEMA.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"label": Label(column="ill", classes=CLASSES)},
        classes(ill=["1", "2"], healthy=["0"]),
        classes(well=["0"], ill=["1", "2"]),
        classes(healthy=["0", "1"], ill=["2"]),
        {"missing": ("", "?", "-9")},
        {"missing": ("",)},
        {"policy": "impute"},
        columns(STAGE, AGE, NOTE),
        columns(AGE, STAGE),
        columns(AGE.model_copy(update={"name": "Age"}), STAGE, NOTE),
        columns(AGE, STAGE.model_copy(update={"levels": ("2", "1", "3")}), NOTE),
        columns(AGE, STAGE.model_copy(update={"levels": ("1", "2")}), NOTE),
        columns(AGE, STAGE, NOTE.model_copy(update={"kind": "numeric"})),
        columns(AGE.model_copy(update={"mean": 51.0}), STAGE, NOTE),
        columns(AGE.model_copy(update={"std": 11.0}), STAGE, NOTE),
        columns(AGE.model_copy(update={"mean": None, "std": None}), STAGE, NOTE),
        columns(AGE.model_copy(update={"unmeasured": ["0"]}), STAGE, NOTE),
        columns(AGE.model_copy(update={"unmeasured": ["0"], "indicator": True}), STAGE, NOTE),
    ],
    ids=str,
)
def test_what_the_sites_must_share_changes_the_digest(change: dict[str, Any]) -> None:
    assert SCHEMA.model_copy(update=change).digest() != SCHEMA.digest()


def test_marks_of_missing_values_count_in_one_form() -> None:
    first, second = (SCHEMA.model_copy(update={"missing": [mark]}) for mark in ("-9", "-9.0"))
    assert first.digest() == second.digest()


def test_a_schema_without_unmeasured_values_keeps_the_digest_of_earlier_versions() -> None:
    # Of fedsilo's schema of the UCI heart files, before columns had 'unmeasured'
    assert HEART.schema(Places(None, Path())).digest() == (
        "32b5dd9268aa23144f4c4c89206908d2873e71ec416fece24730235de268e758"
    )
